"""Pictures and tables of what the planner and the simulator found: on a terminal, and as PNG or SVG files."""
