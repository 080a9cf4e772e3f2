"""Schedule search: the best order for given costs and memory, and how far from the best it can be."""

from pipeswift.search.best import Progress
from pipeswift.search.find import Found, search
from pipeswift.search.problem import Infeasible, Objective, SearchError
from pipeswift.search.replan import load, replanned

__all__ = ["Found", "Infeasible", "Objective", "Progress", "SearchError", "load", "replanned", "search"]
