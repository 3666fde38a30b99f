"""Pages of documentation: what links may point to."""

import re


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def links(text: str) -> list[tuple[str, str]]:
    """Path and anchor of each link to a page of the repository; either may be empty."""
    return re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text)
