"use strict";
// Asks once a second for the parts of the page that have changed, and puts them in place. What a reader has opened, scrolled to or
// focused stays so.
const find = name => document.getElementById(name), LATER_MS = 1000, HIDDEN_MS = 5000;
let version = 0, token = decodeURIComponent(location.hash.slice(1)), heard = new Date(), waiting = null;

async function ask(path) {
  const answer = await fetch(path, { headers: token ? { Authorization: "Bearer " + token } : {}, cache: "no-store" });
  find("keys").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

// What can be scrolled, opened or focused within a part, in its order; another version of the part has the same, as a rule.
const KEPT = "[tabindex],details,summary,a,input";

function put(name, markup) {
  let place = find("part-" + name);
  if (!place) {
    place = document.createElement(name === "header" ? "header" : name === "tiles" ? "div" : "section");
    place.id = "part-" + name;
    if (name === "tiles") place.className = "tiles";
    find("parts").append(place);
  }
  const before = [...place.querySelectorAll(KEPT)];
  const kept = before.map(one => [one.scrollLeft, one.scrollTop, one.open, one.checked, one === document.activeElement]);
  const logs = new Map([...place.querySelectorAll("[data-log]")].map(one => [one.dataset.log, one.lastChild.textContent]));
  place.innerHTML = markup;
  place.hidden = markup === "";
  [...place.querySelectorAll(KEPT)].forEach((one, number) => {
    if (!kept[number]) return;
    const [left, top, open, checked, focused] = kept[number];
    if (open) one.open = true;
    if (checked) one.checked = true;
    if (logs.has(one.dataset.log)) one.lastChild.textContent = logs.get(one.dataset.log);
    one.scrollLeft = left;
    one.scrollTop = top;
    if (focused) one.focus({ preventScroll: true });
  });
}

async function log(details) {
  const text = details.lastChild, end = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
  const told = await (await ask("log/" + details.dataset.log)).text();
  if (told !== text.textContent) {
    text.textContent = told;
    if (end) text.scrollTop = text.scrollHeight;
  }
}

async function follow() {
  clearTimeout(waiting);
  try {
    const told = await (await ask("changes/" + version)).json(), parts = find("parts");
    for (const [name, markup] of Object.entries(told.parts)) put(name, markup);
    told.order.forEach((name, number) => {
      const place = find("part-" + name);
      if (parts.children[number] !== place) parts.insertBefore(place, parts.children[number] ?? null);
    });
    while (parts.children.length > told.order.length) parts.lastChild.remove();
    version = told.version;
    document.title = document.querySelector("h1")?.textContent ?? "a run";
    for (const details of document.querySelectorAll("details[data-log][open]")) await log(details);
    heard = new Date();
    find("lost").hidden = true;
  } catch (error) {
    if (find("keys").hidden) {
      const since = error instanceof TypeError ? `No answer since ${heard.toLocaleTimeString()}: the run has ended, or its machine ` +
        "cannot be reached. What stands below is the last that was heard; `watch RUN` shows a run that is over." : error.message;
      if (find("lost").textContent !== since) find("lost").textContent = since;
      find("lost").hidden = false;
    }
  }
  waiting = setTimeout(follow, document.hidden ? HIDDEN_MS : LATER_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) follow(); });
document.addEventListener("toggle", event => { if (event.target.open && event.target.dataset.log) log(event.target); }, true);
find("enter").addEventListener("click", () => { token = find("key").value.trim(); follow(); });
find("key").addEventListener("keydown", event => { if (event.key === "Enter") find("enter").click(); });
follow();
