"""Clean running text out of typewritten lines, Markdown and wikitext: paragraphs with an empty line between them."""

from __future__ import annotations

import html
import re

MARKDOWN_NAVIGATION = re.compile(r'\[[^\]]*\]\([^)]*"Go\s+to[^)]*\)')
MARKDOWN_LINK = re.compile(r'\[([^\]]*)\]\([^)\s]*(?:\s+"[^"]*")?\)')

DROPPED_ELEMENTS = "ref|gallery|source|syntaxhighlight|timeline|score|imagemap|hiero|references|math|chem|code|pre"
DROPPED_SECTIONS = {
    "see also",
    "references",
    "notes",
    "notes and references",
    "external links",
    "further reading",
    "bibliography",
    "sources",
    "footnotes",
    "citations",
    "works cited",
    "general references",
    "gallery",
    "discography",
    "filmography",
    "publications",
}
KEPT_TEMPLATES = {
    "lang": -1,
    "transl": -1,
    "nowrap": 1,
    "small": 1,
    "smaller": 1,
    "quote": 1,
    "nihongo": 1,
    "formatnum": 1,
    "angbr": 1,
    "abbr": 1,
    "respell": 1,
}
FORMULA = "\N{REPLACEMENT CHARACTER}"  # marks a paragraph that would have a hole where a formula stood
LIST_ITEM_LENGTH = 80  # characters below which an item of a list is a mere name


def unwrap(lines: list[str]) -> str:
    """Prose typed in lines of fixed length; an empty line ends a paragraph. Verse, indented and with a capital in every
    line, keeps its lines. Rules of asterisks, editors' notes in brackets, footnotes and underscores go."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", "\n".join(line.rstrip() for line in lines)):
        rows = [row for row in block.split("\n") if row]
        joined = " ".join(row.strip() for row in rows)
        if not joined or joined[0] in "*[":
            continue
        if len(rows) > 1 and all(re.match(r"\s+\W*[A-Z]", row) for row in rows):
            text = "\n".join(row.strip() for row in rows)
        else:
            text = re.sub(r"-- | --", "--", re.sub(r"\s+", " ", joined))
        paragraphs.append(text.replace("_", "").replace("*", ""))
    return "\n\n".join(paragraphs)


def markdown(source: str) -> str:
    """Markdown with hard line breaks, as html2text writes it. Links keep their text; emphasis, bullets, rules, tables
    and the links to the previous and next page go."""
    source = MARKDOWN_NAVIGATION.sub("", source)
    source = MARKDOWN_LINK.sub(r"\1", source)
    source = re.sub(r"(?m)^ {0,2}#+ (.*)$", r"\n\1\n", source)
    source = re.sub(r"(?m)^[ >]*(?:[*-] *){3,}$", "", source)
    source = re.sub(r"(?m)^ *(?:[*+-]|\d+\\?\.) ", "\n", source)
    paragraphs = []
    for block in re.split(r"\n(?:[ >]*\n)+", source):
        rows = [re.sub(r"^[ >]+", "", row).rstrip() for row in block.split("\n")]
        if any(row.startswith("|") or row == "---" or " | " in row for row in rows):
            continue
        text = re.sub(r"(\w)- (?=[a-z])", r"\1-", " ".join(rows))
        text = re.sub(r"\*+|(?<!\w)_+|_+(?!\w)", "", text)
        text = re.sub(r"\\([-.+*_#()\[\]])", r"\1", html.unescape(text))
        paragraphs.append(re.sub(r'(^|\s)"\s', _attach, _tidy(text)))
    return "\n\n".join(paragraph for paragraph in paragraphs if re.search(r"\w", paragraph))


def wikitext(source: str) -> str:
    """The running text of a Wikipedia page: headings, paragraphs and long list items. Notes, tables, pictures, most
    templates, closing sections and paragraphs with formulas go; links keep their text."""
    text = re.sub(r"<!--.*?-->", "", source, flags=re.DOTALL)
    text = re.sub(r"<ref[^<>]*/>", "", text, flags=re.IGNORECASE)
    text = re.sub(rf"<({DROPPED_ELEMENTS})\b[^<>]*>(.*?)</\1\s*>", _element, text, flags=re.DOTALL | re.IGNORECASE)
    text = _innermost(r"\{\{([^{}]*)\}\}", _template, text)
    text = _innermost(r"\{\|(?:(?!\{\||\|\}).)*\|\}", lambda match: "\n", text)
    text = _innermost(r"\[\[([^\[\]]*)\]\]", _link, text)
    text = re.sub(r"\[(?:https?:|ftp:)?//[^\s\]]+\s*([^\]]*)\]", r"\1", text)
    text = re.sub(r"https?://\S+", "", text)
    text = re.sub(r"<br\s*/?>", " ", text, flags=re.IGNORECASE)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", "", text)
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"__[A-Z]+__", "", html.unescape(html.unescape(text)))
    return "\n\n".join(_sections(text.split("\n")))


def _attach(match: re.Match) -> str:
    """A quotation mark between two spaces goes with the text it opens or, after an odd number of marks, closes."""
    closing = match.string.count('"', 0, match.start()) % 2
    return '" ' if closing else f'{match[1]}"'


def _element(match: re.Match) -> str:
    return FORMULA if match[1].lower() in ("math", "chem", "source", "syntaxhighlight", "pre", "code") else ""


def _innermost(pattern: str, replace, text: str) -> str:
    """Replace matches until none is left, so that nested ones go from the inside out."""
    compiled = re.compile(pattern, re.DOTALL)
    count = 1
    while count:
        text, count = compiled.subn(replace, text)
    return text


def _template(match: re.Match) -> str:
    name, *arguments = (part.strip() for part in match[1].split("|"))
    name, arguments = name.lower(), [argument for argument in arguments if not re.match(r"\w+\s*=", argument)]
    if name in ("convert", "cvt") and len(arguments) > 1:
        return f"{arguments[0]} {arguments[1]}"
    if name == "as of" and arguments:
        return f"as of {arguments[0]}"
    if name.startswith("formatnum:"):
        return name.removeprefix("formatnum:")
    if name in KEPT_TEMPLATES and arguments:
        position = KEPT_TEMPLATES[name]
        return arguments[-1] if position < 0 else arguments[min(position, len(arguments)) - 1]
    return FORMULA if name in ("math", "chem", "mvar", "frac", "sfrac", "val", "su") else ""


def _link(match: re.Match) -> str:
    target, *labels = match[1].split("|")
    namespace = re.match(r"\s*:?\s*([A-Za-z-]+)\s*:\S", target)
    if namespace and (namespace[1].lower() in ("file", "image", "category", "media", "wikt") or not labels):
        return ""
    return labels[-1] if labels else target


def _sections(lines: list[str]) -> list[str]:
    """Paragraphs and those headings that have text below them."""
    kept: list[str] = []
    headings: list[tuple[int, str]] = []
    skipping = 0
    for line in lines:
        heading = re.fullmatch(r"\s*(={2,6})\s*(.*?)\s*=+\s*", line)
        if heading:
            level = len(heading[1])
            if skipping and level > skipping:
                continue
            skipping = level if heading[2].lower() in DROPPED_SECTIONS else 0
            headings = [item for item in headings if item[0] < level]
            if not skipping:
                headings.append((level, _tidy(heading[2])))
            continue
        paragraph = "" if skipping else _paragraph(line)
        if paragraph:
            kept += [title for _, title in headings]
            headings = []
            kept.append(paragraph)
    return kept


def _paragraph(line: str) -> str:
    """One line of wikitext, or nothing when it is no prose or has a hole or left-over markup."""
    marker = re.match(r"[*#:;]*", line)[0]
    text = _tidy(line[len(marker) :])
    broken = re.search(rf"\{{\{{|\}}\}}|\{{\||\|\}}|\[\[|\]\]|^[|!]|{FORMULA}|\|\|", text)
    if broken or not re.search(r"\w", text) or (marker and len(text) < LIST_ITEM_LENGTH):
        return ""
    return text


def _tidy(text: str) -> str:
    """One space between words, none before punctuation, three dots without spaces, no empty brackets."""
    text = re.sub(r"\s+", " ", text.replace("\N{NO-BREAK SPACE}", " "))
    text = re.sub(r"(?<!\.)\.(?: ?\.){2}(?!\.)", "...", text)
    text = re.sub(r"\(\s*[,;:\s]*\)|\[\s*\]", "", text)
    text = re.sub(r"([(\[])[\s,;]+", r"\1", text)
    text = re.sub(r"[\s,;]+([)\]])", r"\1", text)
    text = re.sub(r"\s+([,;:!?]|\.(?![\w.]))", r"\1", text)
    return re.sub(r" {2,}", " ", text).strip()
