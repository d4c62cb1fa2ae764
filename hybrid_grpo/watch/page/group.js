// All completions of a prompt, from the best to the worst: what they share, and where they part. Of several runs, the
// answers to one prompt stand side by side.
import { differing } from "./differing.js";
import { ask, el, number } from "./dom.js";
import { answerText, promptText } from "./sample.js";
import { runColor, state } from "./state.js";

const MOST_RUNS = 4;

// all: the completion, of a run, whose group is shown; offset: where it is; open(run, row) shows another one.
export async function groups(run, all, offset, open) {
  const others = state.open.filter(other => other !== run).slice(0, MOST_RUNS - 1);
  const found = await Promise.all([
    ask("group", { run, step: all.step, offset }),
    ...others.map(other => groupOf(other, all)),
  ]);
  return el(
    "div",
    { class: "columns" },
    ...[run, ...others].map((name, at) => column(name, found[at], all, name === run ? offset : null, open)),
  );
}

// The newest group of the same prompt in another run, at the same step or before it; else the newest of all.
async function groupOf(run, all) {
  if (all.prompt_id === undefined) return [];
  for (const last of [all.step, ""]) {
    let next = null;
    do {
      const answer = await ask("samples", { run, prompt: all.prompt_id, last, step: next?.[0], offset: next?.[1] });
      if (answer.rows.length) return ask("group", { run, step: answer.rows[0].step, offset: answer.rows[0].offset });
      next = answer.next;
    } while (next);
  }
  return [];
}

function column(run, rows, all, chosen, open) {
  const ranked = alike(rows, offset => offset === chosen),
    texts = ranked.map(answerText),
    start = sharedStart(texts),
    rests = texts.map(text => text.slice(start.length)),
    rewards = rows.map(row => row.reward).filter(reward => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const isOther = ranked.length && promptText(ranked[0].prompt) !== promptText(all.prompt);
  return el(
    "div",
    { class: "column" },
    el("h3", {}, el("span", { class: "dot", style: { background: `var(${runColor(run)})` } }), run),
    el(
      "p",
      { class: "soft" },
      ranked.length
        ? `Step ${ranked[0].step}: ${rows.length} completions, mean reward ${rewards.length ? number(mean) : "none"}.`
        : "No completion of this prompt was saved.",
    ),
    isOther && el("p", { class: "bad" }, "This run's data has another text for this prompt."),
    start && el("pre", { class: "shared", tabindex: 0, "aria-label": "All begin with" }, start),
    ...ranked.map((row, at) => {
      // The best one is what the others are compared with.
      const pieces = at ? differing(rests[0], rests[at])[1] : [[rests[0], false]];
      return el(
        "div",
        { class: `member${row.isChosen ? " chosen" : ""}` },
        el(
          "button",
          { type: "button", title: "Show this completion", onclick: () => open(run, row) },
          `reward ${row.reward === null ? "none" : number(row.reward)}, advantage ${number(row.advantage)}, ` +
            `${row.length ?? "–"} tokens, ${row.finish ?? "–"}${row.count > 1 ? `: ${row.count} times` : ""}`,
        ),
        el(
          "pre",
          {},
          ...pieces.map(([text, differs]) => (differs ? el("mark", {}, text) : text)),
          rests[at] ? "" : el("span", { class: "soft" }, start ? "(nothing more)" : "(empty)"),
        ),
      );
    }),
  );
}

// Completions from the best to the worst; those that say the same for the same reward are one, with their `count`.
function alike(rows, isChosen) {
  const found = new Map();
  for (const row of rows) {
    const key = JSON.stringify([answerText(row), row.reward]),
      one = found.get(key) ?? { ...row, count: 0, isChosen: false };
    one.count++;
    one.isChosen ||= isChosen(row.offset);
    found.set(key, one);
  }
  return [...found.values()].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
}

// What all texts begin with, to the end of a word; nothing where there is only one text.
function sharedStart(texts) {
  if (texts.length < 2) return "";
  let size = 0;
  while (texts.every(text => size < text.length && text[size] === texts[0][size])) size++;
  return texts.every(text => text.length === size) ? texts[0] : texts[0].slice(0, size).replace(/[\p{L}\p{N}_]+$/u, "");
}
