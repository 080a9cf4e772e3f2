"""Programs to test with, and how to read them."""

from hypothesis import settings
from hypothesis import strategies as st

from pipeswift.ir import Action, Op
from pipeswift.program import Form, Kind, Part, Program, Seconds, Work, chunk, compile_action

#: For property tests: the first example may take long, while modules load.
quick = settings(max_examples=60, deadline=None)

#: A program as text: what the host does, a line per step.
_SIGNS = {Kind.TAKE: "take", Kind.COMPUTE: "run", Kind.SEND: "send", Kind.LAUNCH: "launch", Kind.WAIT: "wait"}


def text(program: Program) -> str:
    return "\n".join(f"{_SIGNS[kind]} {str(work).partition(' ')[2]}" for kind, work in program.steps)


def one_block(op: Op, form: Form = Form.MOE) -> Program:
    """One action of a stage that is one MoE block and has no neighbours."""
    return compile_action(Action(0, op, 0), layout=(form,), takes=False, sends=False)


def layer(ratio: float, latency: float = 0.0) -> Seconds:
    """An expert layer whose compute takes 1 second per op and whose two all-to-alls take `ratio` for each."""

    def seconds(work: Work) -> float:
        if work.part in (Part.DISPATCH, Part.COMBINE):
            return latency + ratio / 2 / work.chunks
        return latency + 1 / work.chunks if work.part is Part.EXPERTS else 0.0

    return seconds


def respects_its_needs(program: Program) -> bool:
    """Every work is started once, after what it needs is done: computed, taken, or launched and waited for."""
    started, done = set(), set()
    for kind, work in program.steps:
        if kind is Kind.WAIT:
            assert work in started - done, f"{work} is waited for twice, or before its launch"
            done.add(work)
            continue
        assert work not in started
        assert done.issuperset(program.after[work]), f"{work} starts too early"
        started.add(work)
        if kind is not Kind.LAUNCH:
            done.add(work)
    return started == done == program.after.keys()


layouts = st.lists(st.sampled_from(Form), min_size=1, max_size=2).map(tuple)


@st.composite
def programs(draw: st.DrawFn, ops: tuple[Op, ...] = tuple(Op), stage: int = 0) -> Program:
    """A program of any op and layout, in any number of chunks."""
    action = Action(stage, draw(st.sampled_from(ops)), draw(st.integers(0, 3)))
    ends = {"takes": draw(st.booleans()), "sends": draw(st.booleans())}
    whole = compile_action(action, layout=draw(layouts), **ends)
    return chunk(whole, draw(st.integers(1, 4)), local_first=draw(st.booleans()))


@st.composite
def costs(draw: st.DrawFn) -> Seconds:
    """Seconds by part and op, some of them zero."""
    table = draw(st.lists(st.sampled_from((0.0, 0.1, 0.5, 1.0, 3.0)), min_size=40, max_size=40))
    return lambda work: table[4 * work.part + work.op] / work.chunks
