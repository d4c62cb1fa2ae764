// Before anything is drawn: the colors that were chosen, or those of the system.
"use strict";
// A page in a frame of another one, as wandb shows a report, may have no storage.
function recallChoice(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}
function rememberChoice(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch {}
}
const chosen = recallChoice("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
