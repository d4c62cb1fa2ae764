// Before anything is drawn: the colours that were chosen, or those of the system.
"use strict";
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
