// What is shown. It stands in the page's address, so that a reload, a bookmark or a link shows the same.

const WORDS = ["window", "chart", "base", "grouped"];
const VIEWS = ["curves", "samples", "step", "settings"];

export const state = {
  view: "curves",
  open: [],
  // The run that the others are compared with; whether the runs of a group (log.group) are one.
  base: "",
  grouped: "",
  axis: "step",
  window: "",
  range: null,
  // The step that is seen from the inside; null: the newest.
  step: null,
  // Words that charts are found by; titles of the charts that are logarithmic, and of those that are enlarged.
  chart: "",
  logs: new Set(),
  wide: new Set(),
  // What the samples are searched by, by the name of the field, and the step and offset of the one that is open.
  query: {},
  sample: null,
  // Of the server: all runs by name, and the folders that it looks into; of the runs that are open, the numbers, the
  // alarms and the settings.
  runs: new Map(),
  folders: [],
  numbers: new Map(),
  alarms: [],
  settings: [],
};

export function remember() {
  const query = new URLSearchParams({ view: state.view, axis: state.axis });
  for (const name of WORDS) if (state[name]) query.set(name, state[name]);
  if (state.range) query.set("range", state.range.join("~"));
  if (state.step !== null) query.set("step", state.step);
  for (const title of state.logs) query.append("log", title);
  for (const title of state.wide) query.append("wide", title);
  for (const [name, value] of Object.entries(state.query)) if (value) query.set(`find.${name}`, value);
  if (state.sample) query.set("sample", state.sample.join("~"));
  for (const run of state.open) query.append("run", run);
  try {
    history.replaceState(null, "", `#${query}`);
  } catch {
    // A page in a frame of another one may have no address of its own.
  }
}

export function recall() {
  const query = new URLSearchParams(location.hash.slice(1));
  const pair = name => {
    const ends = (query.get(name) ?? "").split("~").map(Number);
    return query.get(name) && ends.length === 2 && ends.every(Number.isFinite) ? ends : null;
  };
  state.view = VIEWS.includes(query.get("view")) ? query.get("view") : "curves";
  state.axis = ["step", "tokens", "hours"].includes(query.get("axis")) ? query.get("axis") : "step";
  for (const name of WORDS) state[name] = query.get(name) ?? "";
  state.range = pair("range");
  state.step = query.has("step") && Number.isInteger(Number(query.get("step"))) ? Number(query.get("step")) : null;
  state.logs = new Set(query.getAll("log"));
  state.wide = new Set(query.getAll("wide"));
  const fields = [...query].filter(([name]) => name.startsWith("find."));
  state.query = Object.fromEntries(fields.map(([name, value]) => [name.slice("find.".length), value]));
  state.sample = pair("sample");
  state.open = [...new Set(query.getAll("run"))];
}

// What is compared: runs, or groups of runs by the name of the group.
export const teamOf = run => (state.grouped && state.runs.get(run)?.group) || run;
export const teams = () => Map.groupBy(state.open, teamOf);

// Runs that a reader has put away, by their folders.
export const archived = new Set(JSON.parse(recallChoice("archived") ?? "[]"));
export function archive({ folder }) {
  if (!archived.delete(folder)) archived.add(folder);
  rememberChoice("archived", JSON.stringify([...archived]));
}

// One run: a color for each curve. Several: a color for each run or group, and dashes for its curves.
export const COLORS = 8;
export const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
export const runColor = run =>
  state.base && state.open.length > 1 && teamOf(run) === teamOf(state.base)
    ? "--text"
    : `--c${Math.max(0, [...teams().keys()].indexOf(teamOf(run))) % COLORS}`;
export const look = (run, curve) =>
  state.open.length > 1
    ? { color: runColor(run), dash: DASHES[curve % DASHES.length] }
    : { color: `--c${curve % COLORS}`, dash: curve < COLORS ? [] : DASHES[1] };

// Parts of a step's time: a part has one color wherever it is shown.
const PARTS = {
  generate: 0, train: 1, reward_wait: 2, reference: 3, switch: 4, gather: 4, other: 5, wait: 5, release: 6, eval: 7,
}; // prettier-ignore
export const partColor = name => {
  const sum = [...name].reduce((sum, letter) => (31 * sum + letter.codePointAt(0)) % 9973, 0);
  return `var(--c${PARTS[name] ?? sum % COLORS})`;
};
