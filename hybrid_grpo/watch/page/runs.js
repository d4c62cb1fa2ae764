// The list of runs: which are there, how far they are, and which of them are shown.
import { byId, duration, el, whole } from "./dom.js";
import { archived, runColor, state } from "./state.js";

const QUIET_S = 60;

// The runs that are shown, as options.
export function offerRuns(select) {
  if (state.open.join() !== [...select.options].map(option => option.value).join())
    select.replaceChildren(...state.open.map(name => el("option", { value: name }, name)));
}

function progress(run) {
  if (run.step === null || run.step === undefined) {
    const before = { running: "loading", ended: "ended before the first step", gone: "killed before the first step" };
    return before[run.state] ?? "no steps yet";
  }
  const steps = `step ${whole(run.step)}${run.steps ? ` of ${whole(run.steps)}` : ""}`;
  if (run.steps && run.step >= run.steps) return `${steps}, finished`;
  if (run.state === "ended") return `${steps}, stopped ${duration(run.age)} ago`;
  if (run.state === "gone") return `${steps}, killed ${duration(run.age)} ago`;
  const quiet = run.age > Math.max(QUIET_S, 5 * (run.step_seconds ?? 0));
  if (quiet) return `${steps}, silent for ${duration(run.age)}`;
  const left = run.steps && run.step_seconds ? `, ${duration((run.steps - run.step) * run.step_seconds)} left` : "";
  return `${steps}${left}`;
}

function isLive(run) {
  if (run.state) return run.state === "running";
  return (
    !(run.steps && run.step >= run.steps) &&
    run.age !== null &&
    run.age <= Math.max(QUIET_S, 5 * (run.step_seconds ?? 0))
  );
}

const DAY = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false };
const when = ms => (ms ? new Date(ms).toLocaleString("en-GB", DAY) : "");

const isFound = (run, words) => {
  const text = [run.run, ...(run.tags ?? []), run.notes ?? ""].join(" ").toLowerCase();
  return words.every(word => text.includes(word));
};
const wanted = () => byId("find-run").value.toLowerCase().split(/\s+/).filter(Boolean);

// The runs that are found, in the order of the list.
export function foundRuns() {
  const by = byId("sort-runs").value || "written",
    words = wanted();
  const order = (a, b) => (by === "run" ? a.run.localeCompare(b.run) : (b[by] ?? -Infinity) - (a[by] ?? -Infinity));
  return [...state.runs.values()]
    .filter(run => isFound(run, words) && (withArchived || !archived.has(run.folder)))
    .sort((a, b) => order(a, b) || 0);
}

const items = new Map();
let ordered = "",
  withArchived = false;

// Elements stay and only what they say changes: a click between two answers of the server must not be lost.
export function showRuns(acts) {
  const away = [...state.runs.values()].filter(run => archived.has(run.folder)).length,
    textContent = withArchived ? "Hide archived runs" : `Show ${away} archived`,
    onclick = () => showRuns(acts, (withArchived = !withArchived));
  Object.assign(byId("archived"), { hidden: !away, textContent, onclick });
  byId("count").textContent = `${state.open.length} of ${state.runs.size}`;
  for (const [name, item] of items)
    if (!state.runs.has(name)) {
      item.line.remove();
      items.delete(name);
    }
  for (const run of state.runs.values()) {
    if (!items.has(run.run)) items.set(run.run, makeItem(run, acts));
    update(items.get(run.run), run);
  }
  const found = foundRuns(),
    names = found.map(run => run.run),
    list = byId("runs");
  // Nothing moves away from under the pointer, except by a choice of the reader.
  const moved = JSON.stringify([names.toSorted(), byId("sort-runs").value]);
  if (moved !== ordered || !list.matches(":hover"))
    for (const [at, name] of names.entries())
      if (list.children[at] !== items.get(name).line)
        list.insertBefore(items.get(name).line, list.children[at] ?? null);
  ordered = moved;
  for (const [name, item] of items) item.line.hidden = !names.includes(name);
}

function makeItem(run, acts) {
  const item = {
    box: el("input", { type: "checkbox", onchange: event => acts.open(run.run, event.target.checked) }),
    live: el("i", { class: "live", title: "being written" }),
    progress: el("span", { class: "soft" }),
    done: el("span"),
    about: el("span", { class: "soft about" }),
    last: el("span", { class: "bad last" }),
    note: el("span"),
  };
  item.label = el(
    "label",
    { class: "run", title: run.folder },
    item.box,
    el("span", { class: "name" }, run.run, item.live),
    item.progress,
    el("span", { class: "track" }, item.done),
    item.about,
    item.last,
    item.note,
  );
  const act = (name, title) => {
    const about = { type: "button", title, "aria-label": `${title}: ${run.run}` };
    return el("button", { ...about, onclick: () => acts[name](run.run) }, name);
  };
  item.pin = act("pin", "Pin as the baseline that others are compared with");
  item.archive = act("archive", "Archive in this browser: hide from the list");
  item.acts = el("span", { class: "acts live-only" }, act("only", "Show only this run"), item.archive, item.pin);
  item.line = el("li", {}, item.label, item.acts);
  return item;
}

function update(item, run) {
  const isOpen = state.open.includes(run.run),
    reading = isOpen && state.numbers.get(run.run);
  item.box.checked = isOpen;
  item.label.style.setProperty("--run", isOpen ? `var(${runColor(run.run)})` : "var(--faint)");
  item.live.hidden = !isLive(run);
  item.progress.textContent = progress(run);
  item.done.style.width = `${run.steps ? Math.min(100, (100 * (run.step ?? 0)) / run.steps) : 0}%`;
  item.acts.hidden = state.runs.size < 2;
  item.pin.classList.toggle("pinned", run.run === state.base);
  item.pin.textContent = run.run === state.base ? "unpin" : "pin";
  item.archive.textContent = archived.has(run.folder) ? "restore" : "archive";
  const about = JSON.stringify([run.started, run.tags, run.notes]);
  if (item.shown !== about) {
    item.shown = about;
    item.about.replaceChildren(
      when(run.started),
      ...(run.tags ?? []).map(tag => el("b", { class: "tag" }, tag)),
      ...(run.notes ? [el("em", { title: run.notes }, run.notes.split("\n")[0])] : []),
    );
  }
  item.last.textContent = run.last ?? "";
  const damaged = reading && reading.damaged > 0;
  item.note.className = damaged ? "bad" : "soft";
  item.note.textContent =
    reading && reading.read < 1
      ? `reading, ${Math.floor(100 * reading.read)} %: curves are coarse until then`
      : damaged
        ? `${reading.damaged} damaged lines are left out`
        : "";
}
