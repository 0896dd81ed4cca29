#!/usr/bin/env python3
"""Draws what a command printed as a still image of a terminal: scripts/terminal_svg.py 'COMMAND' < OUTPUT > IMAGE.svg

Colours and cursor movements are removed; of lines that were overwritten (carriage return) the last state is shown. Lines of more than
COLUMNS characters are cut.
"""

import re
import sys
from html import escape

COLUMNS = 120
FONT_SIZE = 13
CHARACTER = 7.83
LINE = 18
MARGIN = 16
BAR = 30
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines_of(text):
    for line in ESCAPES.sub("", text).splitlines():
        line = line.rstrip("\r").rsplit("\r", 1)[-1].rstrip()
        yield line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip().splitlines()[0])
    lines = ["$ " + sys.argv[1], *lines_of(sys.stdin.read())]
    width = round(2 * MARGIN + COLUMNS * CHARACTER)
    height = BAR + 2 * MARGIN + len(lines) * LINE
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">')
    print(f"<title>Output of {escape(sys.argv[1])}</title>")
    print(f"<style>text {{ font: {FONT_SIZE}px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; "
          "fill: #c9d1d9; white-space: pre } .prompt { fill: #7ee787 } .time { fill: #8b949e }</style>")
    print(f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>')
    for number, colour in enumerate(["#ff5f56", "#ffbd2e", "#27c93f"]):
        print(f'<circle cx="{MARGIN + 4 + number * 20}" cy="{BAR // 2 + 2}" r="6" fill="{colour}"/>')
    for number, line in enumerate(lines):
        y = BAR + MARGIN + number * LINE
        time = re.match(r"\[ *\d+\.\ds\] ", line)
        if number == 0:
            shown = f'<tspan class="prompt">{escape(line)}</tspan>'
        elif time:
            shown = f'<tspan class="time">{escape(time[0])}</tspan>{escape(line[time.end():])}'
        else:
            shown = escape(line)
        if shown:
            print(f'<text x="{MARGIN}" y="{y}" xml:space="preserve">{shown}</text>')
    print("</svg>")


if __name__ == "__main__":
    main()
