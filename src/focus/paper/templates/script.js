"use strict";
const one = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const make = (tag, text, ...children) => {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  element.append(...children);
  return element;
};
all("[hidden]").forEach(element => { if (!element.matches(".claim")) element.hidden = false; });

// Colours: as the system has them, or as chosen; kept where the browser allows it.
const themes = ["automatic", "light", "dark"];
const store = (key, value) => {
  try { return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value); } catch { return null; }
};
function paint(theme) {
  if (theme === "automatic") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  one("#theme").textContent = `Colours: ${theme}`;
}
let theme = themes.includes(store("focus-theme")) ? store("focus-theme") : "automatic";
paint(theme);
one("#theme").addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  paint(theme);
  store("focus-theme", theme);
});

// Filters of the claims, by verdict, place and words.
const claims = all(".claim");
const words = new Map();
function index() { for (const claim of claims) words.set(claim, claim.textContent.toLowerCase()); }
index();
const filters = one("#filters");
function filter() {
  const verdict = one("#by-verdict").value, place = one("#by-place").value;
  const wanted = one("#by-text").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const claim of claims) {
    claim.hidden = Boolean(
      (verdict && claim.dataset.verdict !== verdict)
      || (place && !claim.dataset.places.split("|").includes(place))
      || wanted.some(word => !words.get(claim).includes(word)));
  }
  for (const button of all("[data-filter]")) button.setAttribute("aria-pressed", button.dataset.filter === verdict);
  const mine = all("#claims .claim"), shown = mine.filter(claim => !claim.hidden);
  one("#found").textContent = `${shown.length} of ${mine.length} shown`;
}
if (filters) {
  filters.addEventListener("input", filter);
  filters.addEventListener("submit", event => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(filter));
  for (const button of all("[data-filter]")) {
    button.addEventListener("click", () => {
      const choice = one("#by-verdict"), verdict = button.dataset.filter;
      choice.value = choice.value === verdict ? "" : verdict;
      filter();
      if (choice.value) one("#claims").scrollIntoView();
    });
  }
  filter();
}

// A link to a claim or table shows it whatever the filters say.
function reveal() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.hidden && filters) { filters.reset(); setTimeout(() => target.scrollIntoView()); }
  const details = target.closest("details");
  if (details) details.open = true;
}
addEventListener("hashchange", reveal);
reveal();

// Sorting: by number where most cells of a column start with one, else by text; cells without a value stay last.
const factors = { K: 1024, M: 1024 * 1024 };
function numberIn(text) {
  const found = text.replace(/,/g, "").match(/^[^\d+-]{0,3}([+-]?\d+(?:\.\d+)?)\s?([KM]\b)?/);
  return found ? Number(found[1]) * (factors[found[2]] || 1) : NaN;
}
const empty = text => ["", "-", "–", "not run"].includes(text);
function sort(table, column, head) {
  const body = one("tbody", table), rows = all("tr", body);
  const text = row => row.cells[column].textContent.trim();
  const filled = rows.map(text).filter(each => !empty(each));
  const numeric = filled.filter(each => !isNaN(numberIn(each))).length > filled.length / 2;
  const down = head.getAttribute("aria-sort") === "ascending";
  const order = (a, b) => numeric
    ? numberIn(a) - numberIn(b)
    : a.localeCompare(b, "en", { numeric: true });
  rows.sort((a, b) => {
    const [left, right] = [text(a), text(b)];
    const lacking = each => empty(each) || (numeric && isNaN(numberIn(each)));
    if (lacking(left) || lacking(right)) return lacking(left) - lacking(right);
    return down ? order(right, left) : order(left, right);
  });
  all("th", table.tHead).forEach(each => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}
function sortable(table) {
  all("th", table.tHead).forEach((head, column) => {
    const button = make("button", null, ...head.childNodes);
    button.type = "button";
    head.append(button);
    button.addEventListener("click", () => sort(table, column, head));
  });
}

// What is folded away travels packed, and so does where a number comes from.
let data = null;
async function unpacked(selector) {
  const packed = Uint8Array.from(atob(one(selector).textContent), character => character.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(plain).text());
}
async function load() {
  const folded = await unpacked("#folded");
  for (const place of all("[data-folded]")) place.outerHTML = folded[place.dataset.folded];
  data = await unpacked("#provenance");
  all("table.sortable").forEach(sortable);
  all(".command").forEach(copyable);
  index();
  reveal();
}
const loaded = load();
const resolve = value => (value && typeof value === "object" && "$" in value ? data.shared[value.$] : value);
function facts(pairs) {
  const list = make("dl");
  for (const [name, value] of pairs) {
    if (value !== null && value !== undefined && value !== "") list.append(make("dt", name), make("dd", value));
  }
  return list;
}
function flat(value, name = "") {
  const found = resolve(value);
  if (found === null || typeof found !== "object") return [[name, found === null ? "none" : String(found)]];
  if (Array.isArray(found) && found.every(each => typeof each !== "object")) return [[name, found.join(", ")]];
  return Object.entries(found).flatMap(([key, each]) => flat(each, name ? `${name}.${key}` : key));
}
function describe(result) {
  const settings = result.settings, provenance = result.provenance;
  const versions = Object.entries(resolve(provenance.versions) || {}).map(([name, version]) => `${name} ${version}`);
  const part = make("section", null, make("h3", null, make("code", result.path)));
  part.append(facts([
    ["Experiment", result.experiment],
    ["Model", settings.model],
    ["Text", settings.corpus],
    ["Method", settings.method],
    ["Attention", settings.attention && settings.attention + (settings.top_k ? `, k=${settings.top_k}` : "")],
    ["Seed", settings.seed],
    ["Device", [provenance.device, provenance.processor].filter(Boolean).join(", ")],
    ["Computed as", [provenance.dtype, provenance.backend].filter(Boolean).join(", ")],
    ["Threads", provenance.threads],
    ["Took", provenance.seconds === undefined ? null : `${provenance.seconds} s`],
    ["Peak memory", provenance.peak_memory_mib && `${provenance.peak_memory_mib} MiB`],
    ["Finished", provenance.finished],
    ["Code", provenance.code],
    ["Versions", versions.join(", ")],
  ]));
  for (const [title, value] of [["All settings", settings], ["Models and data", provenance.revisions]]) {
    const lines = flat(value || {});
    if (lines.length) part.append(make("details", null, make("summary", title), facts(lines)));
  }
  return part;
}
async function show(element) {
  await loaded;
  const body = one("#source-body"), cell = element.closest("td");
  const row = cell && cell.closest("tr"), table = cell && cell.closest("table");
  const about = [["Shown", element.textContent.trim()]];
  if (table && one("tbody th", table)) {
    about.push(["Row", row.cells[0].textContent.trim()], ["Column", one("thead", table).rows[0].cells[cell.cellIndex].textContent.trim()]);
  }
  if (element.dataset.v) about.push(["Full precision", element.dataset.v]);
  const results = element.dataset.r.split(" ").filter(Boolean).map(place => data.results[place]);
  body.replaceChildren(facts(about), ...results.map(describe));
  one("#source").showModal();
  body.scrollTop = 0;
}
document.addEventListener("click", event => {
  const element = event.target.closest("[data-r]");
  if (element && element.dataset.r) show(element);
  else if (event.target === one("#source")) one("#source").close();
});

// Commands to copy, and the page on paper.
function copyable(command) {
  const button = make("button", "Copy");
  button.type = "button";
  button.className = "copy";
  command.append(button);
  button.addEventListener("click", async () => {
    const code = one("code", command);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
one("#print").addEventListener("click", () => print());
let closed = [];
addEventListener("beforeprint", () => {
  closed = all("main details:not([open])");
  closed.forEach(details => { details.open = true; });
});
addEventListener("afterprint", () => closed.forEach(details => { details.open = false; }));
