// One completion in full: what it says, as text or token by token, and what was saved of it.
import { differing } from "./differing.js";
import { el, number } from "./dom.js";
import { runColor, state } from "./state.js";
import { xray } from "./tokens.js";

let byTokens = true;

// all: the saved completion; tokens: what was recorded about its tokens, or null; rival: another one of its group, and
// which it is, or null; wanted: words to mark.
// group: shows its group.
export function completion(run, all, tokens, rival, wanted, close, group) {
  const facts = [
    ["reward", all.reward === null ? "none" : number(all.reward)],
    ["advantage", number(all.advantage)],
    ["tokens", String(all.length)],
    ["ended by", all.finish],
    ["prompt", String(all.prompt_id)],
    ["group", `${all.group}, completion ${all.sample}`],
    ...(all.source ? [["source", all.source]] : []),
    ...(all.writer ? [["written by", all.writer]] : []),
    ...(all.policies ? [["sampled by", `${all.policies} ${all.policies > 1 ? "versions" : "version"} of the policy`]] : []),
  ];
  return [
    el(
      "header",
      {},
      el("h2", {}, el("span", { class: "dot", style: { background: `var(${runColor(run)})` } }), `Step ${all.step}`),
      el(
        "button",
        { type: "button", class: "to-group", onclick: group },
        state.open.length > 1 ? "Group, and other runs" : "Group",
      ),
      el("button", { type: "button", "aria-label": "Close", onclick: close }, "×"),
    ),
    list(facts),
    el("h3", {}, "Prompt"),
    ...shown(all.pictures),
    ...said("Prompt", all.prompt, wanted),
    // What an agent wrote in histories of its own, before the last one.
    ...(all.chats ?? []).flatMap((chat, at) => [
      el("h3", {}, `History ${at + 1} of ${all.chats.length + 1}`),
      ...said("History", chat, wanted),
    ]),
    ...answer(all, tokens, wanted),
    ...(rival ? beside(all, rival) : []),
    ...part(
      "Rewards by function",
      Object.entries(all.rewards ?? {}).map(([name, value]) => [
        name,
        all.failed?.[name] ? `failed: ${all.failed[name]}` : value === null ? "does not apply" : number(value),
      ]),
    ),
    ...part(
      "Data columns",
      Object.entries(all.columns ?? {}).map(([name, value]) => [name, plain(value)]),
    ),
    ...part(
      "Logged by reward functions",
      Object.entries(all.extra ?? {})
        .filter(([, value]) => value !== null)
        .map(([name, value]) => [name, plain(value)]),
    ),
  ];
}

// The completion as text, and where its tokens were recorded also token by token.
function answer(all, tokens, wanted) {
  const text = el("div", {}, ...said("Completion", all.messages?.length > 1 ? all.messages : all.completion, wanted));
  if (!tokens) return [el("h3", {}, "Completion"), text];
  const rays = xray(tokens);
  const choices = [
    [false, "Text"],
    [true, "Tokens"],
  ].map(([is, label]) =>
    el(
      "button",
      { type: "button", onclick: () => choose((byTokens = is)), "aria-pressed": "false", "data-tokens": String(is) },
      label,
    ),
  );
  function choose(is) {
    text.hidden = is;
    rays.hidden = !is;
    for (const [at, choice] of choices.entries()) choice.setAttribute("aria-pressed", String(is === Boolean(at)));
  }
  // Words that were searched for are marked in the text.
  choose(byTokens && !wanted);
  return [el("div", { class: "either" }, el("h3", {}, "Completion"), ...choices), text, rays];
}

// The words in which a completion and the best or the worst one of its group differ.
function beside(all, { kind, row }) {
  const rewards = `rewards ${number(all.reward)} and ${number(row.reward)}`;
  const sides = differing(answerText(all), answerText(row));
  return [
    el("h3", {}, `Compared with the ${kind} of its group: ${rewards}`),
    ...sides.map((pieces, side) =>
      el(
        "pre",
        { class: "side", tabindex: 0, "aria-label": side ? `The ${kind} completion of the group` : "This completion" },
        ...pieces.map(([text, differs]) => (differs ? el("mark", {}, text) : text)),
      ),
    ),
  ];
}

// A completion as one text, also where it is a conversation.
export const answerText = all =>
  all.messages?.length > 1
    ? all.messages.map(message => `${message.role}: ${spoken(message)}`).join("\n\n")
    : plain(all.completion);

export const promptText = prompt =>
  Array.isArray(prompt)
    ? prompt.map(message => `${message.role}: ${spoken(message)}`).join("\n\n")
    : plain(prompt ?? "");

const plain = value => (typeof value === "string" ? value : JSON.stringify(value));
const list = entries =>
  el("dl", {}, ...entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value ?? "–"))));
const part = (title, entries) => (entries.length ? [el("h3", {}, title), list(entries)] : []);

// The pictures that the model saw: small copies from the run's folder, or their names if there are none.
function shown(pictures) {
  const figures = (pictures ?? []).map(({ name, src }, at) =>
    el(
      "figure",
      {},
      src && el("img", { src, alt: `Picture ${at + 1}: ${name}` }),
      el("figcaption", {}, `${at + 1}. ${name}`),
    ),
  );
  return figures.length ? [el("div", { class: "pictures" }, ...figures)] : [];
}

function said(title, text, wanted) {
  if (!Array.isArray(text))
    return [
      el(
        "pre",
        { tabindex: 0, "aria-label": title },
        ...(text ? marked(plain(text), wanted) : [el("span", { class: "soft" }, "(empty)")]),
      ),
    ];
  return text.map(message =>
    el(
      "div",
      { class: `turn ${message.role}` },
      el("b", {}, message.role),
      el("pre", {}, ...marked(spoken(message), wanted)),
    ),
  );
}

// What a message says, and the tools that it calls.
function spoken(message) {
  const calls = (message.tool_calls ?? []).map(
    call => `${call.function?.name}(${plain(call.function?.arguments ?? "")})`,
  );
  return [...(message.content ? [parts(message.content)] : []), ...calls].join("\n");
}

// What the parts of a message say, and where those are that are no text.
const parts = content =>
  Array.isArray(content) ? content.map(part => part.text ?? `[${part.type}]`).join(" ") : plain(content);

// A text with words marked, in upper or lower case.
export function marked(text, words) {
  const wanted = words.toLowerCase(),
    low = text.toLowerCase(),
    parts = [];
  if (!wanted || low.length !== text.length) return [text];
  let at = 0;
  for (let hit = low.indexOf(wanted); hit >= 0; hit = low.indexOf(wanted, at)) {
    parts.push(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + wanted.length)));
    at = hit + wanted.length;
  }
  return [...parts, text.slice(at)];
}
