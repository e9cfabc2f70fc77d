// Text into the clipboard, also for pages that were not served securely, where the browser offers only the old way.

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyTheOldWay(text);
  }
}

function copyTheOldWay(text) {
  const focused = document.activeElement;
  const box = document.createElement("textarea");
  box.className = "unseen";
  box.value = text;
  document.body.append(box);
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return isDone;
}
