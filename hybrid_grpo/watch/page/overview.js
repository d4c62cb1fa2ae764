// The runs at a glance: their newest numbers side by side, and when alarms were on.
import { byId, duration, el, number, place } from "./dom.js";
import { runColor, state } from "./state.js";

const label = name =>
  name === "reward/mean"
    ? "reward"
    : name
        .replace(/^(eval|completion|policy|throughput)\//, "")
        .replaceAll(/[/_]/g, " ")
        .replace(" per s", "/s");
const SETTINGS_SHOWN = 4,
  LONGEST = 24;
const dot = run => el("span", { class: "dot", style: { background: `var(${runColor(run)})` } });

export function showOverview() {
  const runs = state.open.map(name => state.numbers.get(name)).filter(Boolean);
  const columns = new Map(runs.flatMap(run => run.numbers.map(entry => [entry.name, entry])));
  // The most important first.
  const settings = state.differing.filter(entry => !entry.name.startsWith("log.")).slice(0, SETTINGS_SHOWN);
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "Run"),
    ...settings.map(entry =>
      el("th", { scope: "col", title: `${entry.name} is not the same in all runs shown` }, entry.name),
    ),
    ...[...columns.values()].map(entry =>
      el("th", { scope: "col", title: `${entry.name}: ${entry.meaning}` }, label(entry.name)),
    ),
    el("th", { scope: "col", title: "Median of the last 20 steps" }, "step time"),
    el("th", { scope: "col", title: "Seconds of steps, evaluations and checkpoints" }, "work"),
  );
  const rows = runs.map(run => {
    const of = new Map(run.numbers.map(entry => [entry.name, entry]));
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, dot(run.run), run.run),
      ...settings.map(entry => setting(entry.values[run.run])),
      ...[...columns.keys()].map(name => cell(of.get(name))),
      el("td", {}, run.step_seconds === null ? "–" : duration(run.step_seconds)),
      el("td", {}, duration(run.hours * 3600)),
    );
  });
  const scrolled = byId("overview").firstChild?.scrollLeft ?? 0;
  byId("overview").replaceChildren(
    rows.length
      ? el(
          "div",
          { class: "scroll card", tabindex: 0, role: "group", "aria-label": "Newest numbers; scrolls sideways" },
          el("table", { class: "numbers" }, el("thead", {}, head), el("tbody", {}, ...rows)),
        )
      : el(
          "p",
          { class: "empty" },
          state.runs.size ? "Choose a run on the left." : "There is no run here yet. It appears with its first step.",
        ),
  );
  byId("overview").firstChild.scrollLeft = scrolled;
}

// Of a long value, such as a path, its end says most.
const setting = (value = "–") =>
  el("td", { title: value }, value && value.length > LONGEST ? `…${value.slice(-LONGEST)}` : (value ?? "–"));

function cell(entry) {
  if (!entry) return el("td", { class: "soft" }, "–");
  const best =
    entry.best !== null &&
    entry.best !== entry.value &&
    el("small", {}, `best ${number(entry.best)}, step ${entry.best_step.toLocaleString("en-US")}`);
  const first = entry.first !== null && el("span", { class: "soft" }, `${number(entry.first)} → `);
  return el("td", {}, first, number(entry.value), best);
}

// zoom([low, high]) shows a part of the axis.
export function showAlarms(span, zoom, waits = false) {
  const axis = state.axis,
    [low, high] = span,
    width = high - low || 1;
  const box = byId("alarms");
  // A mark must not move away under the pointer.
  if (waits && box.matches(":hover")) return;
  const focused = [...box.querySelectorAll("button")].indexOf(document.activeElement);
  if (!state.alarms.length) {
    box.replaceChildren(...(state.open.length ? [el("p", { class: "calm" }, "No alarm has been on.")] : []));
    return;
  }
  const near = at => {
    const room = Math.max(at[1] - at[0], width / 40);
    return [Math.max(low, at[0] - room), Math.min(high, at[1] + room)];
  };
  const words = alarm => {
    const [first, last] = alarm.at[axis];
    return first === last ? place(axis, first) : `${place(axis, first)} to ${place(axis, last)}`;
  };
  const tracks = state.open.map(run => {
    const marks = state.alarms
      .filter(alarm => alarm.run === run && alarm.at[axis][1] >= low && alarm.at[axis][0] <= high)
      .map(alarm => {
        const [first, last] = alarm.at[axis].map(at => Math.min(1, Math.max(0, (at - low) / width)));
        return el("button", {
          type: "button",
          class: "mark",
          style: { left: `${100 * first}%`, width: `max(6px, ${100 * (last - first)}%)` },
          title: `${words(alarm)}: ${alarm.message}`,
          "aria-label": `${run}, ${words(alarm)}: ${alarm.message}`,
          onclick: () => zoom(near(alarm.at[axis])),
        });
      });
    return el(
      "div",
      { class: "timeline" },
      el("span", { class: "name" }, dot(run), run),
      el("div", { class: "line" }, ...marks),
    );
  });
  const list = state.alarms.map(alarm =>
    el(
      "li",
      {},
      el("button", { type: "button", onclick: () => zoom(near(alarm.at[axis])) }, dot(alarm.run), words(alarm)),
      el("span", {}, alarm.message),
    ),
  );
  box.replaceChildren(
    el(
      "div",
      { class: "card alarms" },
      el("h2", {}, `Alarms (${state.alarms.length})`),
      ...tracks,
      el("ol", {}, ...list),
    ),
  );
  box.querySelectorAll("button")[focused]?.focus();
}
