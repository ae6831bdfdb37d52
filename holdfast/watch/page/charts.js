// Curves and lanes as SVG. Nothing here asks the network, and texts get in as text only.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150, LEFT = 46, RIGHT = 6, TOP = 8, BOTTOM = 20;

export function draw(name, facts = {}, text = null) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(facts)) found.setAttribute(key, value);
  if (text !== null) found.textContent = text;
  return found;
}

export function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// A curve over steps: mean as a line, lowest to highest as a band, cursor by pointer and arrow keys.
export class Curve {
  constructor(place, title) {
    this.title = title;
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.name = document.createElement("span");
    this.name.textContent = title;
    this.value = document.createElement("output");
    this.value.setAttribute("aria-live", "polite");
    caption.append(this.name, this.value);
    this.svg = draw("svg", { height: HEIGHT, role: "img", tabindex: 0 });
    this.figure.append(caption, this.svg);
    place.append(this.figure);
    this.at = null;
    this.data = null;
    this.stop = 1;  // the last step that the axis has
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.paint(); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => { this.at = null; this.paint(); });
    new ResizeObserver(() => this.paint()).observe(this.figure);
  }

  // data: steps, mean, low, high; marks: steps at which somebody was lost; other: the curve of another run
  show(data, { until = Infinity, marks = [], other = null } = {}) {
    let end = data.steps.length;
    while (end > 0 && data.steps[end - 1] > until) end--;
    this.data = { steps: data.steps.slice(0, end), mean: data.mean.slice(0, end), low: data.low.slice(0, end), high: data.high.slice(0, end) };
    this.marks = marks.filter((step) => step <= until);
    this.other = other;
    this.figure.hidden = end === 0;
    this.paint();
  }

  key(event) {
    const last = this.data ? this.data.steps.length - 1 : -1;
    if (last < 0) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key in moves) this.at = Math.min(last, Math.max(0, (this.at ?? last) + moves[event.key]));
    else if (event.key === "Home") this.at = 0;
    else if (event.key === "End") this.at = last;
    else return;
    event.preventDefault();
    this.paint();
  }

  point(x) {
    if (!this.data || !this.data.steps.length) return;
    const box = this.svg.getBoundingClientRect(), steps = this.data.steps;
    const share = (x - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT);
    const step = steps[0] + share * (this.stop - steps[0]);
    this.at = steps.reduce((best, each, place) => (Math.abs(each - step) < Math.abs(steps[best] - step) ? place : best), 0);
    this.paint();
  }

  paint() {
    const data = this.data, width = this.figure.clientWidth;
    if (!data || !data.steps.length || !width) return;
    const other = this.other && this.other.steps.length ? this.other : null;
    const last = data.steps.length - 1, first = data.steps[0];
    const stop = Math.max(data.steps[last], first + 1, other ? other.steps[other.steps.length - 1] : 0);
    this.stop = stop;
    let low = Math.min(...data.low), high = Math.max(...data.high);
    if (other) { low = Math.min(low, ...other.low); high = Math.max(high, ...other.high); }
    if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
    const x = (step) => LEFT + ((step - first) / (stop - first)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const value = low + share * (high - low);
      parts.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      parts.push(draw("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    parts.push(draw("text", { x: LEFT, y: HEIGHT - 4 }, `step ${first.toLocaleString("en")}`));
    parts.push(draw("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, stop.toLocaleString("en")));
    for (const step of this.marks) if (step >= first) parts.push(draw("line", { class: "mark", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM }));
    const line = (one) => one.steps.map((step, place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(one.mean[place]).toFixed(1)}`).join("");
    const up = data.steps.map((step, place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(data.high[place]).toFixed(1)}`).join("");
    const down = data.steps.map((_, place) => `L${x(data.steps[last - place]).toFixed(1)} ${y(data.low[last - place]).toFixed(1)}`).join("");
    parts.push(draw("path", { class: "band", d: `${up}${down}Z` }));
    parts.push(draw("path", { class: "curve", d: line(data) }));
    if (other) parts.push(draw("path", { class: "other", d: line(other) }));
    const shown = this.at === null ? last : Math.min(this.at, last);
    if (this.at !== null) parts.push(draw("line", { class: "cursor", x1: x(data.steps[shown]), x2: x(data.steps[shown]), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.svg.replaceChildren(...parts);
    this.value.textContent = `${short(data.mean[shown])} at step ${data.steps[shown].toLocaleString("en")}`;
    this.svg.setAttribute("aria-label", `${this.title}: ${short(data.mean[0])} at step ${first}, ${short(data.mean[last])} at step ${data.steps[last]}, between ${short(low)} and ${short(high)}. Arrow keys read single steps.`);
  }
}

const LANES = ["loss", "recovery", "join", "checkpoint", "sync", "replay", "notice", "run"];
const NAMES = { loss: "losses", recovery: "recoveries", join: "joins", checkpoint: "checkpoints", sync: "syncs", replay: "replays", notice: "notices", run: "run" };

// What has happened, one lane for each kind that there is.
export function lanes(place, moments, begin, end, now) {
  const kinds = LANES.filter((kind) => moments.some((moment) => moment.kind === kind));
  const width = place.clientWidth, height = kinds.length * 18 + 6, left = 84;
  const svg = draw("svg", { height, role: "img", "aria-label": `Time line: ${kinds.map((kind) => `${moments.filter((each) => each.kind === kind).length} ${NAMES[kind]}`).join(", ")}. The list below has them in words.` });
  const x = (t) => left + ((t - begin) / Math.max(0.001, end - begin)) * (width - left - 8);
  kinds.forEach((kind, row) => {
    const y = 12 + row * 18;
    svg.append(draw("text", { x: 0, y: y + 4 }, NAMES[kind]), draw("line", { class: "grid", x1: left, x2: width - 8, y1: y, y2: y }));
    for (const moment of moments) {
      if (moment.kind !== kind || moment.t < begin) continue;
      const dot = draw("circle", { class: `lane-${kind}`, cx: x(moment.t), cy: y, r: moment.bad ? 5 : 4 });
      dot.append(draw("title", {}, moment.text));
      svg.append(dot);
    }
  });
  if (now !== null) svg.append(draw("line", { class: "cursor", x1: x(now), x2: x(now), y1: 0, y2: height }));
  place.replaceChildren(svg);
}
