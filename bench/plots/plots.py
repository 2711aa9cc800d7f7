"""plots.py [--out FOLDER] [--data NAME=FILE]... [CHART...] - draws the charts of README.md and docs/ from files of
bench/results. `make plots` calls it; it needs matplotlib (docs/requirements.txt).

Each chart is an SVG whose text and grid take the reader's colours, light or dark. Its first lines name the files that
it was drawn from, with their SHA-256; tests/checks/check_plots.sh compares them with the files of this tree.
"""

import argparse
import csv
import hashlib
import json
import pathlib
import re
import statistics
import sys
import textwrap

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot, ticker  # noqa: E402 # after the backend is chosen

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"

# What a reader's theme decides: drawn in these, replaced by currentColor afterwards.
TEXT, FAINT = "#010203", "#040506"

GALLOC, NATIVE, EXPANDABLE, ASYNC, CUB = "galloc", "PyTorch native", "PyTorch expandable", "cudaMallocAsync", "CUB"
STYLE = {  # colours that can be told apart on white and on black, and by shape
    GALLOC: ("#1a9850", "o"),
    EXPANDABLE: ("#8f6fd1", "D"),
    ASYNC: ("#3a8fd0", "^"),
    NATIVE: ("#d4553f", "s"),
    CUB: ("#b08a1e", "v"),
}

matplotlib.rcParams.update({
    "svg.fonttype": "none",
    "svg.hashsalt": "galloc",
    "font.family": "DejaVu Sans",  # comes with matplotlib and is wide: other fonts fit where it does
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
})
WIDTH = 5.1  # inches: text stays legible on a phone


class Data:
    """The files that a chart reads, noted for its first lines."""

    def __init__(self, replaced):
        self.replaced, self.read = replaced, []

    def text(self, name):
        content = self.replaced.get(name, RESULTS / name).read_bytes()
        self.read.append((name, hashlib.sha256(content).hexdigest()))
        return content.decode()

    def missing(self, name):
        return not self.replaced.get(name, RESULTS / name).exists()

    def stamp(self):
        return "".join(f"<!-- drawn from bench/results/{name} sha256 {digest} -->\n" for name, digest in self.read)


# ---- what the files say -------------------------------------------------------------------------------------------------


def machine(text):
    """GPU, driver, date and commit, of the lines that tests/gpu/describe.sh writes."""
    found = {}
    for name, value in re.findall(r"^(?:# )?(date|GPU|driver|galloc) +(.+)$", text, re.MULTILINE):
        found.setdefault(name, value)
    gpu = re.sub(r",.*", "", found["GPU"])
    commit = re.sub(r".*commit ", "commit ", found["galloc"])
    day = found["date"].split()[0]
    if "simulated" in gpu:
        return f"SIMULATED device, {day}, {commit}"
    return f"measured on one {gpu}, driver {found['driver']}, {day}, {commit}"


def column(row):
    """How an allocator with its settings is called in a chart; None: it is in no chart."""
    settings = row["conf"]
    if row["allocator"] == "torch":
        return EXPANDABLE if "expandable_segments:True" in settings else NATIVE
    return {"galloc": GALLOC, "async": ASYNC, "cub": CUB}.get(row["allocator"]) if settings == "" else None


def rounds_of(text, key):
    """{trace: {allocator: [a figure for each round]}}, without replays that were verified."""
    found = {}
    for line in text.splitlines():
        row = json.loads(line)
        name = column(row)
        if name and row["verify_errors"] is None and not row["oom"] and row[key] is not None:
            found.setdefault(row["trace"], {}).setdefault(name, []).append(row[key])
    return found


def marks(found):
    """{trace: {allocator: (the mark, the least, the most)}}. The mark of a trace is the median of its rounds. A row of
    means is added: its mark is the geometric mean of the traces' marks, as in the tables (bench/compare.sh), its ends
    are the means of a round."""
    rows = {trace: {name: (statistics.median(values), min(values), max(values)) for name, values in by_name.items()}
            for trace, by_name in found.items()}
    means = {}
    for name in next(iter(found.values())):
        mark = statistics.geometric_mean(rows[trace][name][0] for trace in found)
        rounds = [statistics.geometric_mean(values) for values in zip(*(found[trace][name] for trace in found))]
        means[name] = (mark, min(mark, *rounds), max(mark, *rounds))
    return {**rows, "geometric mean": means}


# ---- parts of a chart ------------------------------------------------------------------------------------------------------


def head(figure, title, *lines):
    """A title, and lines that say what was measured, on what and when."""
    lines = [part for line in lines for part in textwrap.wrap(line, 84)]
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    height = figure.get_figheight()
    for i, line in enumerate(lines):
        figure.text(0.01, 1 - (0.34 + 0.15 * i) / height, line, fontsize=7.5, alpha=0.8, va="center")
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - (0.14 + 0.15 * len(lines)) / height))


def dots(axes, found, names):
    """A row for each trace, a mark for each allocator, with a line from least to most."""
    for y, trace in enumerate(reversed(found)):
        for i, name in enumerate(names):
            if name not in found[trace]:
                continue
            middle, least, most = found[trace][name]
            colour, shape = STYLE[name]
            axes.errorbar(middle, y + (len(names) / 2 - 0.5 - i) * 0.13, xerr=[[middle - least], [most - middle]],
                          fmt=shape, color=colour, markersize=5 if name == GALLOC else 4, capsize=2, linewidth=1,
                          zorder=3 + (name == GALLOC))
    axes.set_yticks(range(len(found)), list(reversed(found)))
    for label in axes.get_yticklabels()[:1]:  # of the means; panels on the right have none
        label.set_fontweight("bold")
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.axhline(0.5, color=FAINT, linewidth=0.8, alpha=0.5)
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", length=0)


def apart(values, gap):
    """Where labels of these values go: as near as can be, with a gap between them."""
    at = list(values)
    order = sorted(range(len(at)), key=lambda i: at[i])
    for _ in range(1000):
        for low, high in zip(order, order[1:]):
            missing = gap - (at[high] - at[low])
            if missing > 0:
                at[low], at[high] = at[low] - missing / 2, at[high] + missing / 2
    return at


def keys(figure, names):
    """What the marks stand for, in a line below the chart."""
    handles = [pyplot.Line2D([], [], marker=STYLE[n][1], color=STYLE[n][0], linestyle="none", markersize=5)
               for n in names]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8,
                  handletextpad=0.0, columnspacing=0.7)


# ---- charts --------------------------------------------------------------------------------------------------------------


def timeline(data):
    """Held and live bytes over the calls of one program."""
    text = data.text("nvidia-h200-timeline.csv")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    live, held, trace = {}, {}, None
    for row in csv.DictReader(lines):
        trace, call = row["trace"], int(row["call"])
        torch = EXPANDABLE if "expandable_segments:True" in row["settings"] else NATIVE
        name = {"galloc": NATIVE if "like:pytorch" in row["settings"] else GALLOC, "torch": torch,
                "async": ASYNC}[row["allocator"]]
        live[call] = int(row["live_bytes"]) / 2**30
        held.setdefault(name, {}).setdefault(call, []).append(int(row["held_bytes"]) / 2**30)

    calls, peak = sorted(live), max(live.values())
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.9))
    axes.fill_between(calls, [live[c] for c in calls], color="#8a8f98", alpha=0.45, linewidth=0, step="pre")
    ends = []
    for name in sorted(held, key=lambda n: list(STYLE).index(n)):
        middle = [statistics.median(held[name][c]) for c in calls]
        colour = STYLE[name][0]
        axes.fill_between(calls, [min(held[name][c]) for c in calls], [max(held[name][c]) for c in calls],
                          color=colour, alpha=0.3, linewidth=0, step="pre")
        axes.step(calls, middle, color=colour, linewidth=2.2 if name == GALLOC else 1.5,
                  zorder=4 if name == GALLOC else 3)
        ends.append((middle[-1], name.replace(" ", "\n").replace("cudaMalloc", "cudaMalloc\n"), max(middle) / peak, colour))
    top = max(max(values) for by_call in held.values() for values in by_call.values()) * 1.1

    for (end, name, ratio, colour), at in zip(ends, apart([end[0] for end in ends], 0.12 * top)):
        axes.annotate("", (1, end / top), xytext=(1.035, at / top), xycoords="axes fraction",
                      textcoords="axes fraction", annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0})
        axes.annotate(f"{name} {ratio:.2f}", (1.035, at / top), xytext=(3, 0), xycoords="axes fraction",
                      textcoords="offset points", color=colour, fontsize=8.5, va="center",
                      fontweight="bold" if name == GALLOC else "normal", annotation_clip=False, linespacing=0.95)
    axes.annotate("live", (calls[len(calls) // 2], peak * 0.3), fontsize=9, ha="center")

    length = len(calls) // 3
    for i in (1, 2):
        axes.axvline(calls[i * length - 1], color=FAINT, linewidth=0.8, alpha=0.5, linestyle=(0, (2, 3)))
    for i, name in enumerate(("first time", "again", "again")):
        axes.annotate(name, (calls[i * length], top), xytext=(4, -2), textcoords="offset points", fontsize=8.5,
                      va="top", alpha=0.8)
    axes.set_ylim(0, top)
    axes.set_xlim(0, calls[-1])
    axes.set_ylabel("GiB")
    axes.set_xlabel("allocations and frees")
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}".replace(",", " ")))
    axes.grid(axis="y", alpha=0.25)
    counts = {len(values) for by_call in held.values() for values in by_call.values()}
    head(figure, "Memory held for one program, by allocator",
         f"{trace}, three times in one process; beside a name: held / live, peaks",
         machine(text),
         f"grey: live; line: median of {max(counts)} rounds; coloured band, where they differ: least to most")
    return figure


def replay_of(data):
    return data.text("nvidia-h200-replay.jsonl"), machine(data.text("nvidia-h200-summary.txt"))


def held(data):
    """Peak of held over peak of live bytes, by trace and allocator."""
    text, where = replay_of(data)
    found, names = marks(rounds_of(text, "reserved_ratio")), [GALLOC, EXPANDABLE, ASYNC, NATIVE, CUB]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 5.4))
    dots(axes, found, names)
    axes.set_xscale("log")
    axes.set_xlim(0.98, 4)
    axes.set_xticks([1, 1.2, 1.5, 2, 3, 4], ["1", "1.2", "1.5", "2", "3", "4"])
    axes.minorticks_off()
    axes.set_xlabel("held / live, at their peaks; 1 is the least; logarithmic")
    keys(figure, names)
    head(figure, "Memory held on ten real programs",
         "three passes of each program; mark: median of three rounds; line, where rounds differ: least to most", where)
    return figure


def cost(data):
    """Host time of a call, first pass and third, by trace and allocator."""
    text, where = replay_of(data)
    names = [GALLOC, NATIVE, EXPANDABLE, CUB, ASYNC]
    figure, panels = pyplot.subplots(1, 2, figsize=(WIDTH, 5.4), sharey=True)
    for axes, key, title in zip(panels, ("ns_per_op_warm", "ns_per_op"), ("third pass", "first pass, from nothing")):
        dots(axes, marks(rounds_of(text, key)), names)
        axes.set_xscale("log")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("ns per call, logarithmic")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if key == "ns_per_op_warm" else (1, 3)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:.0f}" if x < 1000 else f"{x/1000:.0f}k"))
        axes.minorticks_off()
    keys(figure, names)
    head(figure, "Host time of an allocation or a free",
         "on ten real programs; mark: median of three rounds, line: least to most; the two panels differ in scale",
         where)
    return figure


def tuning(data):
    """What settings trade: memory held against time in the driver. Simulated."""
    text = data.text("sim-tuning.csv")
    where = re.search(r"(\d{4}-\d\d-\d\d), commit (\S+)", text)
    sums = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        if row["options"] == "":
            sums.setdefault(row["settings"], []).append((float(row["reserved_ratio"]), float(row["driver_ms_model"])))
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.9))
    for name, values in sums.items():
        x, y = sum(v[1] for v in values), 100 * (statistics.geometric_mean(v[0] for v in values) - 1)
        default = name == "default"
        colour, shape = STYLE[GALLOC] if default else STYLE[ASYNC]
        axes.plot(x, y, "o", color=colour, markersize=7 if default else 5)
        axes.annotate("the defaults" if default else name, (x, y), fontsize=8.5, va="center",
                      ha="right" if name.startswith("overhead") else "center",
                      xytext=(0, -11 if default or name.startswith("overhead") else 11), textcoords="offset points",
                      fontweight="bold" if default else "normal")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(60, 6000)
    axes.set_ylim(0.5, 100)
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5 %", "1 %", "2 %", "5 %", "10 %", "20 %", "50 %", "100 %"])
    axes.set_xticks([100, 200, 500, 1000, 2000, 5000], ["100", "200", "500", "1000", "2000", "5000"])
    axes.minorticks_off()
    axes.set_xlabel("driver time for all ten traces, ms, by a model of an H200")
    axes.set_ylabel("held beyond live, at the peaks")
    axes.grid(alpha=0.25)
    head(figure, "What settings trade: memory against driver time",
         "means over ten traces; the corner at the bottom left is the best",
         f"SIMULATED device, {where[1]}, commit {where[2]}; every run gives the same figures")
    return figure


CHARTS = {"timeline": timeline, "held": held, "cost": cost, "tuning": tuning}
NEEDS = {"timeline": "nvidia-h200-timeline.csv"}  # left out until it is measured


# ---- files -------------------------------------------------------------------------------------------------------------------


THEME = """<style>
svg { color: #1f2328 }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }
</style>
"""


def save(figure, data, path):
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    text = path.read_text()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>\n?", "", text, flags=re.DOTALL)
    for colour in (TEXT, FAINT):
        text = text.replace(colour, "currentColor")
    text = text.replace("'DejaVu Sans'", "Helvetica, Arial, sans-serif")
    # In tags a hundredth of a point is enough.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    begin = text.index(">") + 1
    text = text[:begin] + "\n" + data.stamp() + THEME + text[begin:].lstrip("\n")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(f"  {path}")


def main():
    options = argparse.ArgumentParser(description="draws the charts of README.md and docs/")
    options.add_argument("--out", type=pathlib.Path, default=ROOT / "docs", help="folder (docs)")
    options.add_argument("--data", action="append", default=[], metavar="NAME=FILE", help="another file for this one")
    options.add_argument("charts", nargs="*", choices=[*CHARTS, []], help="those to draw (all)")
    given = options.parse_args()
    replaced = {name: pathlib.Path(file) for name, file in (pair.split("=", 1) for pair in given.data)}
    for name in given.charts or CHARTS:
        data = Data(replaced)
        if name in NEEDS and data.missing(NEEDS[name]):
            print(f"  {name}: not drawn, bench/results/{NEEDS[name]} is missing", file=sys.stderr)
            continue
        figure = CHARTS[name](data)
        save(figure, data, given.out / f"{name}.svg")
        pyplot.close(figure)


if __name__ == "__main__":
    main()
