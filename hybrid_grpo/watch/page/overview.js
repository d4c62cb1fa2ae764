// The runs at a glance: their newest numbers side by side, and when alarms were on.
import { byId, duration, el, number, place } from "./dom.js";
import { runColor, state, teamOf, teams } from "./state.js";

const STAGES = /^(eval|completion|policy|throughput)\/|(?<=^reward)\/mean$/;
const label = name => name.replace(STAGES, "").replaceAll(/[/_]/g, " ").replace(" per s", "/s");
const SETTINGS_SHOWN = 4,
  LONGEST = 24,
  // Of more runs or kinds of alarms than these, the charts come first.
  FEW = 2;
const dot = run => el("span", { class: "dot", style: { background: `var(${runColor(run)})` } });
const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
// Of functions, their names say most; of another long value, such as a path, its end.
function brief(value) {
  const functions = [...(value ?? "").matchAll(/"function": ?"([^"]+)"/g)].map(found => found[1].split(":").at(-1));
  const text = functions.join(", ") || value || "–";
  return text.length > LONGEST && !functions.length ? `…${text.slice(-LONGEST)}` : text;
}

// showSettings() leads to all settings.
export function showOverview(showSettings) {
  const runs = state.open.map(name => state.numbers.get(name)).filter(Boolean);
  const columns = new Map(runs.flatMap(run => run.numbers.map(entry => [entry.name, entry])));
  // The most important first; without those that another version does not have.
  const isTelling = ({ name, values }) => !/^(log|checkpoint)\./.test(name) && runs.every(({ run }) => values[run]),
    telling = kind => state.settings.filter(entry => entry[kind] && isTelling(entry)),
    settings = telling("differ").slice(0, SETTINGS_SHOWN),
    changed = runs.length === 1 ? telling("changed") : [];
  const heads = [
    ["Run"],
    ...settings.map(({ name }) => [name, `${name} is not the same in all runs shown`]),
    ...[...columns.values()].map(({ name, meaning }) => [label(name), `${name}, first → newest value: ${meaning}`]),
    ["step time", "Median of the last 20 steps"],
    ["work", "Seconds of steps, evaluations and checkpoints"],
  ];
  const base = state.base && state.open.length > 1 && teamOf(state.base);
  const rows = [...teams()].map(([team, names]) => {
    const members = runs.filter(run => names.includes(run.run)),
      times = members.map(run => run.step_seconds).filter(Boolean),
      note = `${names.length > 1 ? ` ${names.length} runs` : ""}${team === base ? " baseline" : ""}`;
    const of = (column, name) =>
      runs.filter(run => teamOf(run.run) === name).flatMap(run => run.numbers.filter(entry => entry.name === column));
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, dot(names[0]), team, soft(note)),
      ...settings.map(({ values }) => {
        const value = [...new Set(names.map(run => values[run] ?? "–"))].join(", ");
        return el("td", { title: value }, brief(value));
      }),
      ...[...columns.keys()].map(name => cell(of(name, team), base && team !== base ? of(name, base) : [])),
      el("td", {}, times.length ? duration(mean(times)) : "–"),
      el("td", {}, members.length ? duration(mean(members.map(run => run.hours)) * 3600) : "–"),
    );
  });
  const box = byId("overview"),
    scrolled = box.firstChild?.scrollLeft ?? 0,
    head = heads.map(([text, title]) => el("th", { scope: "col", title }, text)),
    table = el("table", { class: "numbers" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)),
    named = { class: "scroll card", tabindex: 0, role: "group", "aria-label": "Newest numbers; scrolls sideways" };
  const chips = changed.map(({ name, values: { [runs[0].run]: value } }) =>
    el("span", { class: "chip", title: `${name}: ${value}` }, `${name} `, el("b", {}, brief(value))),
  );
  const all = el("button", { type: "button", onclick: showSettings }, `all ${changed.length} changed settings`);
  box.replaceChildren(rows.length ? el("div", named, table) : nothing());
  if (changed.length) box.append(el("p", { class: "chips" }, el("span", {}, ...chips), all));
  box.firstChild.scrollLeft = scrolled;
  const first = document.querySelector("#charts > .section");
  if (teams().size > FEW && first) first.after(box);
  else byId("alarms").before(box);
}

function nothing() {
  if (state.runs.size) return el("p", { class: "empty" }, "Choose a run on the left.");
  const command = `hybrid-grpo train --config recipe.yaml --run.dir ${state.folders[0] ?? "runs"}`;
  return el("p", { class: "empty" }, "There is no run here yet. Start one: ", el("code", {}, command));
}

// The values of a run, or a group's mean and the standard deviation between its runs; and how far the baseline is.
function cell(entries, base) {
  if (!entries.length) return el("td", { class: "soft" }, "–");
  const [{ first, best, best_step, value }] = entries,
    values = entries.map(entry => entry.value),
    middle = mean(values),
    spread = Math.sqrt(values.reduce((sum, each) => sum + (each - middle) ** 2, 0) / (values.length - 1)),
    away = base.length ? middle - mean(base.map(entry => entry.value)) : 0,
    difference = away !== 0 && el("small", {}, `${away < 0 ? "" : "+"}${number(away)}`);
  if (entries.length > 1) return el("td", {}, number(middle), soft(` ± ${number(spread)}`), difference);
  const record = best !== null && best !== value && `best ${number(best)} at step ${best_step.toLocaleString("en-US")}`,
    before = first !== null && soft(`${number(first)} → `);
  const small = record && teams().size <= FEW && el("small", {}, record);
  return el("td", { title: record }, before, number(value), difference, small);
}

const soft = text => el("span", { class: "soft" }, text);
let opened = null;

// zoom([low, high]) shows a part of the axis. A line for each kind of alarm, with a lane for each run that it concerns.
export function showAlarms(span, zoom, waits = false) {
  const axis = state.axis,
    [low, high] = span,
    width = high - low || 1,
    box = byId("alarms");
  // A mark must not move away under the pointer.
  if (waits && box.matches(":hover")) return;
  const focused = [...box.querySelectorAll("button")].indexOf(document.activeElement);
  if (!state.alarms.length) {
    const ways = [...state.numbers.values()].map(run => run.closest).filter(Boolean),
      [way, name] = ways.sort(([a], [b]) => b - a)[0] ?? [0, ""],
      alarm = spelled(name.split("/").at(-1)),
      closest = name && ` Closest to its limit: ${alarm}, ${Math.floor(100 * way)} % of the way.`;
    box.replaceChildren(state.open.length ? el("p", { class: "calm" }, "No alarm has been on.", closest) : "");
    return;
  }
  const near = ([first, last]) => {
    const room = Math.max(last - first, width / 40);
    return [Math.max(low, first - room), Math.min(high, last + room)];
  };
  const words = ({ at: { [axis]: [first, last] }, on }) =>
    on || first !== last
      ? `${place(axis, first)} to ${on ? "now" : place(axis, last)}`.replace(/ to step /, " to ")
      : place(axis, first);
  const mark = alarm => {
    const ends = alarm.at[axis],
      [from, to] = ends.map(at => Math.min(1, Math.max(0, (at - low) / width))),
      text = `${alarm.run}, ${words(alarm)}: ${alarm.message}`;
    return el("button", {
      type: "button",
      class: "mark",
      style: { left: `${100 * from}%`, width: `max(6px, ${100 * (to - from)}%)`, background: laneColor(alarm.run) },
      title: text,
      "aria-label": text,
      onclick: () => zoom(near(ends)),
    });
  };
  const inside = alarm => alarm.at[axis][1] >= low && alarm.at[axis][0] <= high;
  const kinds = [...Map.groupBy(state.alarms, alarm => alarm.alarm || alarm.message)].map(([kind, found]) => {
    const newest = found.at(-1),
      lanes = [...Map.groupBy(found.filter(inside), alarm => alarm.run).values()],
      inRuns = new Set(found.map(alarm => alarm.run)).size,
      many = found.length > 1 ? `${found.length} times${inRuns > 1 ? ` in ${inRuns} runs` : ""}` : words(newest);
    const count = found.length > 1 && ` ×${found.length}`,
      show = { type: "button", onclick: () => zoom(near(newest.at[axis])) },
      tracks = lanes.map(lane => el("div", { class: "line" }, ...lane.map(mark))),
      // Without the name of the alarm, which stands beside it.
      message = `${words(newest)}: ${newest.message.replace(`${newest.alarm}: `, "")}`;
    return {
      pill: el("span", { class: `chip${found.some(alarm => alarm.on) ? " on" : ""}` }, spelled(kind), count),
      line: el(
        "li",
        {},
        el("button", show, el("b", {}, spelled(kind)), soft(many)),
        el("div", {}, ...tracks),
        el("span", {}, state.open.length > 1 && dot(newest.run), message),
      ),
    };
  });
  const ringing = state.alarms.filter(alarm => alarm.on).length,
    title = el("h2", {}, `Alarms (${state.alarms.length}${ringing ? `, ${ringing} on` : ""})`),
    open = opened ?? (teams().size <= FEW && kinds.length <= FEW),
    toggle = event => (opened = !event.currentTarget.parentElement.open);
  const summary = el("summary", { onclick: toggle }, title, ...kinds.map(kind => kind.pill)),
    lines = el("ol", {}, ...kinds.map(kind => kind.line));
  box.replaceChildren(el("details", { class: "card alarms", open }, summary, lines));
  box.querySelectorAll("button")[focused]?.focus();
}

const spelled = kind => kind.replaceAll("_", " ").slice(0, 2 * LONGEST);
export const laneColor = run => `var(${state.open.length > 1 ? runColor(run) : "--bad"})`;
