// Before anything is drawn: the colours that were chosen, or those of the system.
"use strict";
// A page in a frame of another one, as trackers show a report, may have no storage.
function recallTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}
function rememberTheme(name) {
  try {
    if (name) localStorage.setItem("theme", name);
    else localStorage.removeItem("theme");
  } catch {}
}
const chosen = recallTheme();
if (chosen) document.documentElement.dataset.theme = chosen;
