// The list of runs: which are there, how far they are, and which of them are shown.
import { byId, duration, el, whole } from "./dom.js";
import { runColor, state } from "./state.js";

const QUIET_S = 60;

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

const items = new Map();

// Elements stay and only what they say changes: a click between two answers of the server must not be lost.
export function showRuns(choose) {
  const wanted = byId("find-run").value.toLowerCase();
  byId("count").textContent = `${state.open.length} of ${state.runs.size}`;
  for (const [name, item] of items)
    if (!state.runs.has(name)) {
      item.line.remove();
      items.delete(name);
    }
  for (const run of state.runs.values()) {
    if (!items.has(run.run)) {
      items.set(run.run, makeItem(run, choose));
      byId("runs").append(items.get(run.run).line);
    }
    update(items.get(run.run), run);
    items.get(run.run).line.hidden = !run.run.toLowerCase().includes(wanted);
  }
}

function makeItem(run, choose) {
  const item = {
    box: el("input", { type: "checkbox", onchange: event => choose(run.run, event.target.checked) }),
    live: el("i", { class: "live", title: "being written" }),
    progress: el("span", { class: "soft" }),
    done: el("span"),
    note: el("span"),
  };
  item.label = el(
    "label",
    { class: "run", title: run.folder },
    item.box,
    el("span", { class: "name" }, run.run, item.live),
    item.progress,
    el("span", { class: "track" }, item.done),
    item.note,
  );
  item.only = el(
    "button",
    { type: "button", class: "only", "aria-label": `Show only ${run.run}`, onclick: () => choose(run.run, true, true) },
    "only",
  );
  item.line = el("li", {}, item.label, item.only);
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
  item.only.hidden = state.runs.size < 2;
  const damaged = reading && reading.damaged > 0;
  item.note.className = damaged ? "bad" : "soft";
  item.note.textContent =
    reading && reading.read < 1
      ? `reading, ${Math.floor(100 * reading.read)} %: curves are coarse until then`
      : damaged
        ? `${reading.damaged} damaged lines are left out`
        : "";
}
