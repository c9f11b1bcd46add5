r"""Answers as models write them, by class: T equal, F not equal, in both directions. Judged by what the words and signs mean."""

import pytest

from align.verify import equivalent, grade

CLASSES = {
    # What stands after a number may name what was counted; words that take it back, hedge it, bound it or reckon on with it are no unit.
    "words after a number": r"""
F 5 ~ 5 squared
F 5 ~ 5 \text{ cubed}
F 5 ~ 5 factorial
F 5 ~ 5 \text{ and a half}
F 5 ~ 5 \text{ and a quarter}
F 5 ~ 5\text{ plus one}
F 5 ~ 5\text{ minus one}
F 5 ~ 5\text{ times two}
F 5 ~ 5\text{ divided by two}
F 5 ~ 5\text{ over two}
F 5 ~ 5\text{ choose two}
F 5 ~ 5\text{ to the power two}
F 5 ~ 5\text{ to six}
F 5 ~ 5\text{ through six}
F 5 ~ 5\text{ and six}
F 5 ~ 5\text{, six}
F 5 ~ 5\text{ (six)}
F 5 ~ 5\text{ twenty-five}
F 5 ~ 5\text{ doubled}
F 5 ~ 5\text{ halved}
F 5 ~ 5\text{ less than seven}
F 5 ~ 5\text{ at least}
F 5 ~ 5\text{ at most}
F 5 ~ 5\text{ isn't it}
F 5 ~ 5\text{ can't be}
F 5 ~ 5\text{ cannot be}
F 5 ~ 5\text{ except six}
F 5 ~ 5\text{ (not)}
F 5 ~ 5\text{ (incorrect)}
F 5 ~ 5\text{ (extraneous)}
F 5 ~ 5\text{ negative}
F 5 ~ 5\text{ degrees below zero}
F 12 ~ 12\text{ base eight}
F 5 ~ 5 modulo
T 15 ~ 15\text{ different ways}
T 15 ~ 15 \text{ more apples}
T 15 ~ 15 \text{ two-digit numbers}
T 15 ~ 15 \text{ men and women}
T 15 ~ 15 \text{ years old}
T 15 ~ 15 \text{ days of the week}
T 5 ~ 5\text{ (five)}
""",
    "words of number": r"""
T 500 ~ 5\text{ hundred dollars}
F 5 ~ 5\text{ hundred dollars}
T 500000000 ~ 5\text{ hundred million}
T \frac12 ~ 5\text{ tenths}
F 5 ~ 5\text{ tenths}
T \frac53 ~ 5 thirds
F 5 ~ 5 thirds
F 5 ~ 5 thousandth
T 0.005 ~ 5\text{ thousandths}
T 500000 ~ 5\text{ lakh}
T 7 ~ 7th
T 7 ~ 7^{\text{th}}
T 21 ~ 21st
F 3 ~ 3th
F 7 ~ 7nd
T -5 ~ negative 5
T -\frac12 ~ \text{negative }\frac12
F 5 ~ minus 5
""",
    # A letter alone is a unit only when the table has it as it is written.
    "letters after a number": r"""
F 5 ~ 5\text{k}
F 5 ~ 5\text{M}
F 5 ~ 5\text{i}
F 5 ~ 5\text{x}
F 5 ~ 5\text{n}
F 12 ~ \$12\text{K}
F 12 ~ \$12\text{m}
T 300 ~ 300\text{ K}
T 5 ~ 5\text{ A}
F 2 ~ 2mg
T 2mg ~ 2gm
F 2\pi ~ 2\pi hr
T 2\pi hr+2\pi r^2 ~ 2\pi r(r+h)
T \pi r^2h ~ \pi hr^2
T 2\text{ hr} ~ 120\text{ min}
T 50 ~ 50 km/hr
""",
    "units": r"""
F 180^\circ ~ 180\text{ radians}
T 180^\circ ~ \pi\text{ radians}
T \frac{\pi}{2}\text{ rad} ~ 90^\circ
T 2 ~ 2\text{ rad/s}
F 2\text{ rad/s} ~ 2\text{ deg/s}
F 5\text{ kcal} ~ 5\text{ kJ}
T 1\text{ kcal} ~ 4.184\text{ kJ}
T 1\text{ acre} ~ 43560\text{ ft}^2
T 2\text{ ha} ~ 20000\text{ m}^2
F 5\text{ K} ~ 5\text{ m}
F 5\text{ MW} ~ 5\text{ kW}
F 5\text{ mA} ~ 5\text{ A}
T 5\text{ A} ~ 5000\text{ mA}
T 8\text{ pints} ~ 1\text{ gallon}
T 3\text{ tsp} ~ 1\text{ tbsp}
F 5\text{ decades} ~ 5\text{ years}
T 5\text{ decades} ~ 50\text{ years}
T 2\text{ centuries} ~ 200\text{ years}
F 5\text{ nickels} ~ 5\text{ dimes}
T 4\text{ nickels} ~ 20\text{ cents}
F 60\text{ rpm} ~ 60\text{ Hz}
T 60\text{ rpm} ~ 1\text{ Hz}
T 24\text{ sq in} ~ 24 in^2
T 2 hours 30 minutes ~ 150 minutes
T 5\text{ ft }6\text{ in} ~ 66\text{ in}
F 2 hours 30 minutes ~ 2.3 hours
F 30 minutes 2 hours ~ 2.5 hours
T 38\text{ days} ~ 5 weeks 3 days
T \$5.50 ~ 5 dollars 50 cents
F 5 ~ 5 dollars 50 cents
F 2 hours 30 hours ~ 32 hours
T ₹500 ~ 500
F ₹500 ~ \$500
T USD 5 ~ \$5
F USD 5 ~ EUR 5
T 50¢ ~ \$0.50
""",
    "opposites and labels": r"""
F 20\% \text{ increase} ~ 20\% \text{ decrease}
T 20\% \text{ increase} ~ 20\%
F 5\text{ m north} ~ 5\text{ m south}
F 5\text{ up} ~ 5\text{ down}
F 5\text{ BC} ~ 5\text{ AD}
F 5 \text{ boys}, 3 \text{ girls} ~ 3 \text{ boys}, 5 \text{ girls}
T 5 \text{ boys}, 3 \text{ girls} ~ 3 \text{ girls}, 5 \text{ boys}
F 5 \text{ apples}, 3 \text{ pears} ~ 3 \text{ apples}, 5 \text{ pears}
F \text{length} = 5, \text{width} = 3 ~ \text{length} = 3, \text{width} = 5
T \text{length} = 5, \text{width} = 3 ~ \text{width} = 3, \text{length} = 5
F \text{mean} = 5 ~ \text{median} = 5
T A = 5 ~ \text{Area} = 5
T 5 ~ \text{Area} = 5
F P(A)=0.3, P(B)=0.5 ~ P(A)=0.5, P(B)=0.3
T P(A)=0.3, P(B)=0.5 ~ P(B)=0.5, P(A)=0.3
T f(x)=5 ~ f=5
F A: 5, B: 3 ~ A: 3, B: 5
F x=1 \text{ and } y=2 ~ x=1 \text{ or } y=2
""",
    "points": r"""
F (3,5) ~ y=3, x=5
T (3,5) ~ y=5, x=3
T (3,5) ~ x=3 \text{ and } y=5
F (3,5) ~ x=3 \text{ or } y=5
F (3,5) ~ x=3, x=5
T (1,2,3) ~ x_1=1,x_2=2,x_3=3
F (1,2,3) ~ x_1=1,x_2=3,x_3=2
T (y,x)=(5,3) ~ x=3,y=5
F (y,x)=(3,5) ~ x=3,y=5
T (2,\frac{\pi}{3}) ~ r=2,\theta=\frac{\pi}{3}
F \{\{1\},2\} ~ \{1,2\}
F (1,\{2\}) ~ (1,2)
T \{\{1\},2\} ~ \{2,\{1\}\}
F \begin{pmatrix}1 & & 2\end{pmatrix} ~ \begin{pmatrix}1 & 2\end{pmatrix}
F \begin{pmatrix}1&2\\&4\end{pmatrix} ~ \begin{pmatrix}1&2\\4&\end{pmatrix}
T \begin{pmatrix}1\\2\\\end{pmatrix} ~ \begin{pmatrix}1\\2\end{pmatrix}
""",
    # The d of a derivative cancels nothing.
    "derivatives": r"""
F \frac{dy}{dx} ~ \frac{y}{x}
F \frac{dy}{dx}=2x ~ \frac{y}{x}=2x
F \frac{dy}{dx} ~ \frac{dx}{dy}
F dy/dx ~ xy
F x ~ \frac{d}{dx}x^2
F 2x ~ \frac{d}{dx}(2x^2)
F \frac{\partial u}{\partial t} ~ \frac{u}{t}
F \frac{\partial f}{\partial x} = 2xy ~ \frac{\partial f}{\partial y} = 2xy
F \frac{d^2y}{dx^2} = 6x ~ \frac{dy}{dx} = 6x
T \frac{d^{2}y}{dx^{2}} = 6x ~ \frac{d^2y}{dx^2} = 6x
T \frac{\mathrm{d}y}{\mathrm{d}x} = 2x ~ dy/dx = 2x
T \frac{dy}{dx} = 2x ~ 2x
T \frac{dy}{dx} + y = 0 ~ \frac{dy}{dx} = -y
T \frac{\Delta y}{\Delta x}=3 ~ 3
T \frac{d}{2} ~ \frac12 d
T \frac{d_1}{d_2} ~ d_1/d_2
T \frac{d^2}{d^3} ~ \frac1d
T \frac{pr}{pq} ~ \frac rq
T \frac{dx}{3} ~ \frac{xd}{3}
""",
    "numbers": r"""
F 720 ~ 3!!
T 3 ~ 3!!
T 48 ~ 6!!
T 105 ~ 7!!
T 1 ~ 0!!
T 720 ~ (3!)!
T \frac{10}{3} ~ 3.(3)
F 9 ~ 3.(3)
T \frac56 ~ 0.8(3)
F 2.4 ~ 0.8(3)
T 11 ~ 2.5(4)+1
T \frac{41}{333} ~ 0.\dot{1}2\dot{3}
T \frac{2}{11} ~ 0.\dot1\dot8
T 0.00012 ~ 1.2 x 10^-4
T 3x ~ 3 x
T 60 ~ 12 \times 5 = 60
F 60 ~ 12 \times 6 = 60
T 120 ~ 5! = 120
F 5 ~ 5 = 5
F 0 ~ 0 = 0
F 5 ~ -5 = -5
F 60\text{ km} ~ 12 \times 5 = 60\text{ miles}
""",
    "texts": r"""
F \text{Fig. }3.5 ~ \text{Fig. }35
F Fig. 3 ~ Fig. -3
F row 1 column 12 ~ row 11 column 2
T \text{Fig. }3.5 ~ Fig 3.5
T \text{St. Louis} ~ St Louis
T \text{twenty-five} ~ twenty five
""",
    "signs": r"""
T 5 ~ 5。
T 5, 6 ~ 5、6
T 5 ~ \large 5
T 5 ~ {\Large 5}
T 5 ~ 5\tag{1}
""",
}


@pytest.mark.parametrize("name", CLASSES)
def test_class(name):
    for line in filter(None, CLASSES[name].split("\n")):
        gold, answer = line[2:].split(" ~ ")
        for a, b in ((gold, answer), (answer, gold)):
            verdict = equivalent(a, b)
            assert (verdict.correct is True) is (line[0] == "T") and verdict.reason != "error", (line, verdict)


@pytest.mark.parametrize("mode", ["final", "marked"])
@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("Final answer: it is 6, not 5", False),
        ("Final answer: between 4 and 5", False),
        ("Final answer: the value could be 4 apples or 5 apples", False),
        ("Final answer: I cannot determine it. There were 5", False),
        ("Final answer: the number of bags might be 5", False),
        ("Final answer: the value isn't equal to 5", False),
        ("Final answer: the number of students who like tea or milk is 5", True),
        ("Final answer: the distance between A and B is 5", True),
        ("Final answer: 2 bags with 3 are 6, and one less is 5", True),
        ("<answer> The answer is 5 </answer>", True),
        ("<answer> The answer is not 5 </answer>", False),
        (r"\boxed{12 - 7 = 5}", True),
        (r"\boxed{12 - 8 = 5}", False),
    ],
)
def test_sentence(text, correct, mode):
    assert (grade("5", text, mode=mode).correct is True) is correct


@pytest.mark.parametrize("text", ["\\frac{", "\\frac{d", "\\frac{d}{", "5!!", "5!!!", "0.\\dot", "0.\\dot{1", "0.(", "3.(3", "dy/", "USD"])
def test_a_beginning_is_no_error(text):
    assert equivalent("5", text).reason != "error" and equivalent(text, "5").reason != "error"
