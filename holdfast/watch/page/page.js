// The live page. All that comes from files is text: it gets in by textContent, never as HTML.
import { Curve, lanes, short } from "/charts.js";

const at = (id) => document.getElementById(id);
const CURVES = [["loss", "Loss"], ["lr", "Learning rate"], ["grad_norm", "Gradient norm"], ["seconds", "Seconds of a step"], ["samples_rate", "Samples per second"], ["workers", "Workers"]];
const COLUMNS = [["Worker", ""], ["Host", "wide"], ["State", ""], ["Layers", "wide"], ["Step", "number"], ["ms", "number"], ["Computing, waiting", ""], ["Sent", "number wide"], ["pid", "number wide"], ["", ""]];
const state = { run: new URLSearchParams(location.search).get("run"), live: null, past: null, curves: null, other: null, t: null, secret: null, over: false, last: 0, source: null };

function make(name, text = "", kind = "") {
  const found = document.createElement(name);
  if (text !== "") found.textContent = text;
  if (kind) found.className = kind;
  return found;
}
const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
const ms = (seconds) => (seconds === null ? "" : seconds >= 0.01 ? String(Math.round(1000 * seconds)) : String(Number((1000 * seconds).toPrecision(2))));
const clock = (t) => new Date(1000 * t).toLocaleTimeString("en-GB");
function bytes(size) {
  if (size === null) return "";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) { if (size < 999.5 || unit === "TB") return `${Number(size.toPrecision(3))} ${unit}`; size /= 1000; }
}
function age(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Number((seconds / 3600).toPrecision(2))} h`;
}

// --- what comes from the server ---------------------------------------------------------------

function connect() {
  if (state.source) state.source.close();
  const source = new EventSource(state.run ? `/api/stream?run=${encodeURIComponent(state.run)}` : "/api/stream");
  source.addEventListener("view", (event) => { at("line").hidden = true; heard(JSON.parse(event.data)); });
  source.addEventListener("curves", (event) => { state.curves = JSON.parse(event.data); show(); });
  source.onerror = () => {
    const over = state.live && ["finished", "stopped"].includes(state.live.phase);
    if (over) { source.close(); state.over = true; }  // its server has gone with the run, and does not come back
    at("line").textContent = over ? "The run is over, and the server has gone. holdfast watch shows the run again." : "The server does not answer. The page connects again by itself.";
    at("line").hidden = false;
  };
  state.source = source;
}

function heard(view) {
  const before = state.live;
  state.live = view;
  state.run = view.run;
  if (before === null) runs(view);
  for (const moment of view.moments) {  // of note: what a screen reader says by itself
    if (moment.t > state.last && before !== null && ["loss", "recovery", "run"].includes(moment.kind)) at("news").textContent = moment.text;
  }
  state.last = Math.max(state.last, ...view.moments.map((moment) => moment.t));
  show();
}

function runs(view) {
  const choice = at("run");
  choice.replaceChildren(...view.runs.map((name) => { const option = make("option", name); option.value = name; return option; }));
  choice.value = view.run;
  at("run-choice").hidden = view.runs.length < 2;
  if (view.runs.length > 1) compare();
}

async function compare() {
  if (state.over) return;
  const other = state.live.runs.find((name) => name !== state.run);
  try {
    const answer = await fetch(`/api/curves?run=${encodeURIComponent(other)}`);
    state.other = answer.ok ? { name: other, curves: await answer.json() } : null;
  } catch { state.other = null; }
  show();
  setTimeout(compare, 2000);
}

async function travel() {
  const share = at("slider").value / 1000, live = state.live;
  if (!live || live.since === null) return;
  if (share === 1) { state.t = state.past = null; show(); return; }
  const t = live.since + share * (live.now - live.since);
  state.t = t;
  const answer = await fetch(`/api/past?run=${encodeURIComponent(state.run)}&t=${t}`);
  if (answer.ok && state.t === t) { state.past = await answer.json(); show(); }
}

// --- what is drawn -----------------------------------------------------------------------------

let drawing = false;
function show() {  // at most once for each picture of the screen
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; if (state.live) paint(); });
}

function paint() {
  const live = state.live, view = state.past || live;
  const phase = at("phase");
  const share = live.share < 1 ? ` (${Math.round(100 * live.share)}% read)` : "";
  const words = (view.phase === "nothing" ? "no events yet" : view.phase) + share;
  if (phase.textContent !== words) phase.textContent = words;
  phase.dataset.phase = view.phase;
  phase.title = view.why;
  at("why").textContent = view.why;
  at("command").textContent = view.command.map((word) => (word.startsWith("/") ? word.split("/").pop() : word)).join(" ");
  at("command").title = view.command.join(" ");
  document.title = `${view.phase}, step ${number(view.step)} – Holdfast`;
  numbers(view);
  survival(view);
  time(live);
  curves(view);
  layers(view);
  workers(view);
  saved(view);
}

function numbers(view) {
  const training = view.workers.filter((worker) => worker.state === "training").length;
  const last = view.saved[view.saved.length - 1];
  const facts = [
    ["Step", number(view.step)], ["Loss", short(view.loss) || "–"], ["Learning rate", short(view.lr) || "–"],
    ["Gradient norm", short(view.grad_norm) || "–"], ["Steps per second", view.rate ? short(view.rate) : "–"],
    ["Workers that train", `${training} of ${view.workers.length}`], ["Generation", number(view.generation)],
    ["Losses", number(view.counts.loss || 0)], ["Recoveries", view.recovery_ms === null ? "0" : `${view.counts.recovery}, ${Math.round(view.recovery_ms)} ms`],
    ["Restarts", number(view.restarts)], ["Last checkpoint", last ? `step ${number(last.step)}` : "none"],
  ];
  if (view.lssr !== null) facts.push(["Steps without exchange", `${Math.round(100 * view.lssr)}%`]);
  const place = at("numbers");
  if (place.children.length !== facts.length) place.replaceChildren(...facts.map(() => { const box = make("div"); box.append(make("dt"), make("dd")); return box; }));
  facts.forEach(([name, value], row) => {
    const [term, said] = place.children[row].children;
    if (term.textContent !== name) term.textContent = name;
    if (said.textContent !== value) said.textContent = value;
  });
}

function survival(view) {
  const words = view.survival.words.join("\n");
  if (at("survival").dataset.words === words) return;
  at("survival").dataset.words = words;
  at("survival").dataset.safe = view.survival.alone.length && view.phase === "training" ? "no" : "yes";
  at("survival").replaceChildren(...view.survival.words.map((line) => make("li", line)));
}

function time(live) {
  const moments = state.t === null ? live.moments : live.moments.filter((moment) => moment.t <= state.t);
  at("slider").disabled = live.since === null;
  at("now").disabled = state.t === null;
  const words = state.t === null ? (live.now === null ? "" : `now, ${clock(live.now)}`) : clock(state.t);
  if (at("moment").textContent !== words) at("moment").textContent = words;
  at("slider").setAttribute("aria-valuetext", words);
  if (live.since !== null) lanes(at("lanes"), live.moments, live.since, Math.max(live.now, live.since + 1), state.t);
  const key = `${moments.length} ${moments.length ? moments[moments.length - 1].t : 0}`;
  if (at("moments").dataset.key === key) return;
  at("moments").dataset.key = key;
  at("moments").replaceChildren(...moments.slice(-100).reverse().map((moment) => make("li", `${clock(moment.t)}, step ${number(moment.step)}: ${moment.text}`, moment.bad ? "bad" : "")));
}

const charts = CURVES.map(([key, title]) => [key, new Curve(at("curves"), title)]);
function curves(view) {
  if (!state.curves) return;
  const until = state.t === null ? Infinity : Math.max(0, view.step - 1);
  const marks = state.live.moments.filter((moment) => moment.kind === "loss").map((moment) => moment.step);
  for (const [key, chart] of charts) {
    const other = state.other && key === "loss" ? state.other.curves[key] : null;
    chart.show(state.curves[key], { until, marks, other });
  }
  charts[0][1].name.textContent = state.other ? `Loss (dashed: ${state.other.name})` : "Loss";
}

function layers(view) {
  const reason = view.reason + (view.logged.length ? `; the log keeps what crosses ${view.logged.length} boundaries` : "");
  if (at("reason").textContent !== reason) at("reason").textContent = reason;
  const placed = view.workers.filter((worker) => worker.pipeline !== null);
  const key = JSON.stringify(placed.map((worker) => [worker.name, worker.pipeline, worker.stage, worker.first, worker.stop, worker.state]));
  if (at("layers").dataset.key === key) return;
  at("layers").dataset.key = key;
  const lines = new Map();
  for (const worker of placed) lines.set(worker.pipeline, [...(lines.get(worker.pipeline) || []), worker]);
  at("layers").replaceChildren(...[...lines.entries()].sort((a, b) => a[0] - b[0]).map(([pipeline, stages]) => {
    const row = make("div", "", "pipeline"), bars = make("div", "", "stages");
    row.append(make("span", `P${pipeline}`), bars);
    for (const worker of stages.sort((a, b) => a.stage - b.stage)) {
      const said = worker.stop - worker.first === 1 ? `layer ${worker.first}` : `layers ${worker.first}–${worker.stop - 1}`;
      const bar = make("div", "", worker.state === "training" ? "stage" : "stage down");
      bar.style.flex = `${worker.stop - worker.first} 1 0`;
      bar.title = `worker ${worker.name}, ${said}`;
      bar.append(make("span", `${worker.name} `), make("small", said));
      bars.append(bar);
    }
    return row;
  }));
  if (!placed.length) at("layers").replaceChildren(make("p", "Nobody holds layers at this moment.", "quiet"));
}

at("columns").replaceChildren(...COLUMNS.map(([name, kind]) => { const cell = make("th", name, kind); cell.scope = "col"; if (!name) cell.append(make("span", "What can be done", "unseen")); return cell; }));
const rows = new Map();
function workers(view) {
  const shown = [...view.workers, ...view.gone.slice(-8).reverse().map((worker) => ({ ...worker, gone: true }))];
  const slowest = Math.max(1e-9, ...shown.map((worker) => worker.seconds || 0));
  const names = new Set();
  for (const worker of shown) {
    const key = `${worker.name} ${worker.since}`;
    names.add(key);
    if (!rows.has(key)) rows.set(key, row(worker));
    fill(rows.get(key), worker, slowest);
  }
  for (const [key, one] of rows) if (!names.has(key)) { one.remove(); rows.delete(key); }
  const order = shown.map((worker) => rows.get(`${worker.name} ${worker.since}`));
  order.forEach((one, place) => { if (at("rows").children[place] !== one) at("rows").insertBefore(one, at("rows").children[place] || null); });
}

function row(worker) {
  const line = make("tr");
  line.append(...COLUMNS.map(([, kind], place) => { const cell = make(place ? "td" : "th", "", kind); if (!place) cell.scope = "row"; return cell; }));
  const spent = make("span", "", "spent");
  spent.append(make("i", "", "computing"), make("i", "", "waiting"));
  line.children[6].append(spent, make("span", "", "unseen"));
  const output = make("button", "output");
  output.setAttribute("aria-label", `Output of worker ${worker.name}`);
  output.addEventListener("click", () => log(worker.name));
  line.children[9].append(output);
  return line;
}

function fill(line, worker, slowest) {
  const cells = line.children;
  line.className = worker.state;
  const texts = [worker.name, worker.host, worker.state + (worker.slow ? ", slow" : ""), worker.stop ? `${worker.first}–${worker.stop - 1}` : "", worker.step === null ? "" : number(worker.step), ms(worker.seconds), null, bytes(worker.sent), worker.pids.slice(0, 2).join(", ")];
  texts.forEach((text, place) => { if (text !== null && cells[place].textContent !== text) cells[place].textContent = text; });
  cells[2].className = worker.slow ? "slow" : worker.state;
  cells[2].title = worker.why;
  const [spent, said] = cells[6].children;
  spent.children[0].style.width = `${(100 * (worker.computing || 0)) / slowest}%`;
  spent.children[1].style.width = `${(100 * (worker.waiting || 0)) / slowest}%`;
  const words = worker.computing === null ? "not known" : `computing ${ms(worker.computing)} ms, waiting ${ms(worker.waiting)} ms`;
  if (said.textContent !== words) { said.textContent = words; spent.title = words; }
  buttons(cells[9], worker);
}

function buttons(cell, worker) {
  const wanted = Boolean(state.secret) && !worker.gone && state.t === null;
  const there = cell.querySelectorAll("button.bad");
  if (wanted === there.length > 0) return;
  for (const button of there) button.remove();
  if (wanted) for (const action of ["kill", "hang", "preempt"]) {
    const button = make("button", action, "bad");
    button.setAttribute("aria-label", action === "preempt" ? `preempt the host of worker ${worker.name}` : `${action} worker ${worker.name}`);
    button.addEventListener("click", () => act(action, worker.name));
    cell.append(" ", button);
  }
}

function saved(view) {
  const key = JSON.stringify(view.saved) + Math.round((view.now || 0) / 5);
  if (at("saved").dataset.key === key) return;
  at("saved").dataset.key = key;
  const lines = [...view.saved].reverse().map((one) => make("li", `step ${number(one.step)}, ${bytes(one.bytes)}, ${clock(one.t)}, ${age(Math.max(0, view.now - one.t))} before the last event`));
  at("saved").replaceChildren(...(lines.length ? lines : [make("li", "none yet")]));
}

// --- what is asked -----------------------------------------------------------------------------

async function log(worker) {
  const answer = await fetch(`/api/log?run=${encodeURIComponent(state.run)}&worker=${encodeURIComponent(worker)}`);
  at("h-log").textContent = `Output of worker ${worker}, its end`;
  at("log-text").textContent = await answer.text() || "it has printed nothing";
  at("log").showModal();
  at("log-text").scrollTop = at("log-text").scrollHeight;
}

async function ask(path, body, headers = {}) {
  return fetch(path, { method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(body) });
}

function say(text) { at("said").textContent = text; at("said").hidden = false; }

async function act(action, worker) {
  const answer = await ask("/api/act", { run: state.run, action, worker }, { authorization: `Bearer ${state.secret}` });
  say(answer.ok ? (await answer.json()).said : await answer.text());
}

async function enter() {  // the code is behind the #, which browsers send to no server
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  state.secret = sessionStorage.getItem("holdfast");
  if (!code) return;
  history.replaceState(null, "", location.pathname + location.search);
  const answer = await ask("/api/enter", { code });
  if (answer.ok) { state.secret = (await answer.json()).secret; sessionStorage.setItem("holdfast", state.secret); }
  else say(await answer.text());
  show();
}

const THEMES = ["system", "light", "dark"];
function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  at("theme").textContent = `Theme: ${name}`;
  at("theme").dataset.name = name;
}
at("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(at("theme").dataset.name) + 1) % THEMES.length];
  localStorage.setItem("holdfast-theme", next);
  theme(next);
});
theme(THEMES.includes(localStorage.getItem("holdfast-theme")) ? localStorage.getItem("holdfast-theme") : "system");
at("slider").addEventListener("input", travel);
at("now").addEventListener("click", () => { at("slider").value = 1000; travel(); });
at("run").addEventListener("change", () => { location.search = `?run=${encodeURIComponent(at("run").value)}`; });
new ResizeObserver(show).observe(at("lanes"));
enter();
connect();
