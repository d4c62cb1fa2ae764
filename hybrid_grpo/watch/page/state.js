// What is shown. It stands in the page's address, so that a reload or a bookmark shows the same.

const VIEWS = ["curves", "samples", "prompts", "step", "settings"];

export const state = {
  view: "curves",
  open: [],
  axis: "step",
  window: "",
  range: null,
  // The step that is seen from the inside; null: the newest.
  step: null,
  // Of the server: all runs by name; of those that are open, the numbers, the alarms, and the settings that differ.
  runs: new Map(),
  numbers: new Map(),
  alarms: [],
  differing: [],
};

export function remember() {
  const query = new URLSearchParams({ view: state.view, axis: state.axis });
  if (state.window) query.set("window", state.window);
  if (state.range) query.set("range", state.range.join("~"));
  if (state.step !== null) query.set("step", state.step);
  for (const run of state.open) query.append("run", run);
  try {
    history.replaceState(null, "", `#${query}`);
  } catch {
    // A page in a frame of another one may have no address of its own.
  }
}

export function recall() {
  const query = new URLSearchParams(location.hash.slice(1));
  state.view = VIEWS.includes(query.get("view")) ? query.get("view") : "curves";
  state.axis = ["step", "tokens", "hours"].includes(query.get("axis")) ? query.get("axis") : "step";
  state.window = query.get("window") ?? "";
  const range = (query.get("range") ?? "").split("~").map(Number);
  state.range = range.length === 2 && range.every(Number.isFinite) ? range : null;
  state.step = query.has("step") && Number.isInteger(Number(query.get("step"))) ? Number(query.get("step")) : null;
  state.open = [...new Set(query.getAll("run"))];
}

// One run: a colour for each curve. Several: a colour for each run, and dashes for its curves.
export const COLORS = 8;
export const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
export const runColor = run => `--c${Math.max(0, state.open.indexOf(run)) % COLORS}`;
export const look = (run, curve) =>
  state.open.length > 1
    ? { color: runColor(run), dash: DASHES[curve % DASHES.length] }
    : { color: `--c${curve % COLORS}`, dash: curve < COLORS ? [] : DASHES[1] };
