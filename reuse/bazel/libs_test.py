"""align beside a libs/ of one's own: Python finds both."""

from libs.helper import WINDOW

from align.verify import grade

assert WINDOW == 4096 and grade("1/2", r"\boxed{0.5}").correct
