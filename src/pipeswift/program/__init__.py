"""What an action is made of: steps over lanes, and the rewrites that let communication hide behind compute.

A dense stage's forward is: take the input, compute, send the output. An MoE stage's has all-to-alls between its parts.
Cutting a program into chunks, arranging its steps by their costs, or weaving two programs into one gives another
program; who runs it need not know.
"""

from pipeswift.program.arrange import arrange, merge
from pipeswift.program.chunks import LOCAL, chunk
from pipeswift.program.compile import Form, compile_action
from pipeswift.program.costs import LINKS, BlockCosts, Line, Link, link_of
from pipeswift.program.granularity import WHOLE, Choice, Grain, choose, formulas, rule_of_thumb
from pipeswift.program.steps import Kind, Lane, Part, Program, Step, Work, issue
from pipeswift.program.timeline import Seconds, Span, Timeline, bound, simulate, together

__all__ = [
    "LINKS",
    "LOCAL",
    "WHOLE",
    "BlockCosts",
    "Choice",
    "Form",
    "Grain",
    "Kind",
    "Lane",
    "Line",
    "Link",
    "Part",
    "Program",
    "Seconds",
    "Span",
    "Step",
    "Timeline",
    "Work",
    "arrange",
    "bound",
    "choose",
    "chunk",
    "compile_action",
    "formulas",
    "issue",
    "link_of",
    "merge",
    "rule_of_thumb",
    "simulate",
    "together",
]
