// Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's theme holds.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("headway-theme");
  } catch {
    // Storage may be forbidden; the page works without it.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
