// Markdown as nodes. marked (vendor/marked.umd.js) only splits the text into tokens; the elements are
// made here, and every piece of text becomes a text node. HTML in an answer is shown as it is written.

const SAFE_LINK = /^(https?:|mailto:)/i;

function markdown(text) {
  try {
    return blocks(marked.lexer(text));
  } catch {  // nested too deeply for the parser
    return [el("p", {}, text)];
  }
}

const BLOCKS = {
  heading: (t) => el(`h${Math.min(6, t.depth + 1)}`, {}, ...inline(t.tokens)),
  paragraph: (t) => el("p", {}, ...inline(t.tokens)),
  blockquote: (t) => el("blockquote", {}, ...blocks(t.tokens)),
  hr: () => el("hr"),
  code: (t) => codeBlock(t.text, t.lang),
  list: (t) => el(t.ordered ? "ol" : "ul", { start: t.ordered && t.start !== 1 ? t.start : null }, ...t.items.map(listItem)),
  table: (t) => el("div", { class: "table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...t.header.map((cell) => tableCell("th", cell)))),
    el("tbody", {}, ...t.rows.map((row) => el("tr", {}, ...row.map((cell) => tableCell("td", cell))))))),
  text: (t) => el("span", {}, ...(t.tokens ? inline(t.tokens) : [t.text])),
  html: (t) => el("p", {}, t.raw.trim()),
};

const INLINE = {
  strong: (t) => el("strong", {}, ...inline(t.tokens)),
  em: (t) => el("em", {}, ...inline(t.tokens)),
  del: (t) => el("del", {}, ...inline(t.tokens)),
  codespan: (t) => el("code", {}, t.text),
  br: () => el("br"),
  link: (t) => (SAFE_LINK.test(t.href)
    ? el("a", { href: t.href, target: "_blank", rel: "noopener noreferrer" }, ...inline(t.tokens))
    : el("span", {}, ...inline(t.tokens), ` (${t.href})`)),
  image: (t) => el("span", {}, t.text || t.href),
  escape: (t) => document.createTextNode(t.text),
  text: (t) => (t.tokens ? el("span", {}, ...inline(t.tokens)) : document.createTextNode(t.text)),
};

const blocks = (tokens) => tokens.filter((t) => t.type !== "space" && t.type !== "def").map((t) => (BLOCKS[t.type] || raw)(t));
const inline = (tokens) => tokens.map((t) => (INLINE[t.type] || raw)(t));
const raw = (t) => document.createTextNode(t.raw);
const tableCell = (tag, cell) => el(tag, { class: cell.align ? `align-${cell.align}` : null }, ...inline(cell.tokens));
const listItem = (item) => el("li", {}, ...(item.task ? [item.checked ? "☑ " : "☐ "] : []), ...blocks(item.tokens));

function codeBlock(text, language) {
  const copy = iconButton("copy", "Copy the code", () => copyText(text, copy));
  return el("div", { class: "code" }, el("pre", { title: language || null }, el("code", {}, text)), copy);
}

// icons: 24 by 24, drawn in the colour of the text

const ICONS = {
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  done: "M4 12l5 6L20 6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
};

function iconButton(icon, title, act) {
  const svg = shape("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" });
  svg.append(shape("path", { d: ICONS[icon] }));
  return el("button", { type: "button", class: "icon", title, "aria-label": title, onclick: act }, svg);
}

async function copyText(text, button) {
  await navigator.clipboard.writeText(text);
  const path = button.querySelector("path");
  path.setAttribute("d", ICONS.done);
  setTimeout(() => path.setAttribute("d", ICONS.copy), 1200);
}
