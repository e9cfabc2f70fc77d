// Puts the page together: chat, live view, load, theme, tabs, key.

import { forgetModel, getApiKey, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { LiveConnection } from "./live.js";
import { Load } from "./load.js";
import { BatchPanel } from "./panel.js";

const $ = (id) => document.getElementById(id);

const panel = new BatchPanel({ onChoose: (replica) => live.choose(replica) });
const live = new LiveConnection({
  onHello: (info) => {
    forgetModel();
    panel.hello(info);
  },
  onFrame: (frame) => panel.frame(frame),
  onTrouble: (trouble) => panel.trouble(trouble),
});
new Chat({
  onAsk: () => panel.expect(true),
  onRequest: (id) => panel.claim(id),
  onEnd: () => panel.expect(false),
});
new Load(() => panel.info);
setUpKey();
setUpTheme();
setUpTabs();
$("reconnect").addEventListener("click", () => live.restart());
live.restart();

function setUpKey() {
  $("fields").addEventListener("submit", (event) => event.preventDefault());
  $("api-key").value = getApiKey();
  $("api-key").addEventListener("change", () => {
    setApiKey($("api-key").value);
    live.restart();
  });
}

function setUpTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  $("theme").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("headway-theme", theme);
    } catch {
      // The choice then lasts as long as the page.
    }
    panel.redraw({ colours: true });
  });
  system.addEventListener("change", () => panel.redraw({ colours: true }));
}

/** On narrow screens; on wide ones both parts stand side by side and the tabs are hidden. */
function setUpTabs() {
  const tabs = ["chat", "batch"].map((name) => [name, $(`tab-${name}`)]);
  const choose = (chosen) => {
    document.querySelector("main").dataset.tab = chosen;
    for (const [name, tab] of tabs) {
      tab.setAttribute("aria-selected", String(name === chosen));
      tab.tabIndex = name === chosen ? 0 : -1;
    }
    panel.redraw();
  };
  for (const [name, tab] of tabs) {
    tab.addEventListener("click", () => choose(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const [other, otherTab] = tabs.find(([each]) => each !== name);
      choose(other);
      otherTab.focus();
    });
  }
}
