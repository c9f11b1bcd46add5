r"""Questions with known answers, run as a program: exit code 1 at the first verdict that is wrong. `mutants_test` runs it on faulty copies.

T: equal, F: not equal, N: no verdict. Bare answers on both sides; lines with ">>" judge an output against a gold.
"""

import sys

from align.verify import equivalent, grade

QUESTIONS = r"""
T 1/2 ~ 0.5
T \frac{1}{3} ~ 0.333333
F \frac{1}{3} ~ 0.3333
F \frac{1}{3} ~ 0.33333
F \frac{1}{3} ~ 0.333334
T \sqrt{17} ~ 4.123105625617661
F \sqrt{17} ~ 4.1231058
F \pi ~ 3.14
F 101 ~ 101.0000001
F 5\text{ cm} ~ 5\text{ km}
F 5\text{ cm} ~ 5\text{ kg}
T 5\text{ cm} ~ 50\text{ mm}
T 5\text{ apples} ~ 5\text{ pieces}
T 5\text{ cm} ~ 5
T 50\% ~ 0.5
T 50\% ~ 50
F 50 ~ 0.5
F 50\% ~ 5
F 30\% ~ 3
F 3\% ~ 30
T 90^\circ ~ \frac{\pi}{2}
F 90 ~ \frac{\pi}{2}
F C ~ D
T \text{(C)} ~ C
F \text{east} ~ \text{seat}
T \text{Yes} ~ yes
F 1,2 ~ 1,2,3
F 1,2,3 ~ 1,2
T 1,2 ~ 2,1
F (1,2) ~ (2,1)
F (1,2) ~ (1,2,3)
F (1,2,3) ~ (1,2)
F [1,2] ~ (1,2)
F [1,2) ~ [1,2]
F [0,1)\cup(3,4) ~ [0,1)\cup[3,4)
F \{1,2\} ~ (1,2)
F 0,1 ~ [0,1]
T 0,1 ~ (0,1)
F 0\text{ or }1 ~ (0,1)
F 100000! ~ 0
T \sin(x+\frac{\pi}{2}) ~ \cos x
T (n+2)! ~ (n+2)(n+1)n!
T x\in\mathbb{R} ~ (-\infty,\infty)
F 1 ~ 1.0000001
F 0.0000001 ~ 0.0000002
T [\sqrt2,\sqrt[4]{4}] ~ \{\sqrt2\}
F x=5 ~ y=5
F \sin^2x+\cos^2x=1 ~ x^2+y^2=4
F \sqrt2x=x\sqrt2 ~ 2x+y=3
F 0=x ~ x=x
F 5 >> \boxed{5\text{ at most}}
F 5 >> \boxed{5\text{ to six}}
F 5 >> \boxed{5\text{ twenty-five}}
F 5 >> \boxed{5\text{k}}
F 20\%\text{ increase} ~ 20\%\text{ decrease}
T 3!! ~ 3
T 6!! ~ 48
F \frac{dy}{dx}=2x ~ \frac{y}{x}=2x
T 180^\circ ~ \pi\text{ radians}
F 180^\circ ~ 180\text{ radians}
F \{\{1\},2\} ~ \{1,2\}
F (3,5) ~ y=3, x=5
F \begin{pmatrix}1&2\end{pmatrix} >> \boxed{\begin{pmatrix}1&&2\end{pmatrix}}
F 2 hours 30 hours ~ 32 hours
T 2 hours 30 minutes ~ 150 minutes
F P(A)=1, P(B)=2 ~ P(A)=2, P(B)=1
F 5 ~ 5=5
T 5 ~ 2+3=5
T x=5 ~ 5
F x=3=5 ~ 5
F x=3=5 ~ x=5
F 12:30 ~ 12:00
F 12:30\text{ am} ~ 12:30\text{ pm}
T 3:4 ~ 6:8
F 3:4 ~ 6:9
F \mathbb{R} ~ \mathbb{Z}
T 2x+3y=6 ~ 4x+6y=12
F 2x+3y=6 ~ 4x+6y=13
F x^2-2x+10=0 ~ x^2-3x+10=0
F 2x+3y=6 ~ 0=0
F 3=3 ~ 4=4
F i^6=-1 ~ i^6=-2
F x^2>3 ~ x^2\ge 3
F x^2>3 ~ -x^2>-3
F x^2>3 ~ x^2<3
T x^2>3 ~ 3<x^2
F x>3 ~ x\ge 3
F x>3 ~ x<3
T -x>-1 ~ x<1
T -2x+4>0 ~ (-\infty,2)
T x>3 ~ (3,\infty)
T x\ne 2 ~ (-\infty,2)\cup(2,\infty)
F x\ne 2 ~ x\ne 3
F x\ne 2 ~ x>2
T [0,1]\cup[1,2] ~ [0,2]
F [0,1)\cup(1,2] ~ [0,2]
T (0,36)\setminus\{9\} ~ (0,9)\cup(9,36)
F (0,36)\setminus\{9\} ~ (0,36)
T [0,5]\cap[2,9] ~ [2,5]
T 0<x<2 ~ (0,2)
F 0<x<2 ~ (0,3)
T e^{i\pi} ~ -1
T i^2 ~ -1
T (1+i)(2+3i) ~ -1+5i
F (1+i)(2+3i) ~ 5+5i
T \sqrt{-4}\sqrt{-9} ~ -6
T |\sqrt2-\sqrt3| ~ \sqrt3-\sqrt2
F |x| ~ x
T |x| ~ \sqrt{x^2}
F \sqrt{x^2y^2} ~ xy
T x^{1/2}x^{1/3} ~ x^{5/6}
T \lceil\pi\rceil ~ 4
T y=\frac{1}{x} ~ xy=1
T {10 \choose 3} ~ 120
T \sum_{i=1}^{4} i^2 ~ 30
F 5 ~ 5\text{ is wrong}
F 5 ~ 5\text{ or so}
T 60\text{ mph} ~ 60\text{ miles per hour}
F \lfloor\sqrt{n-1}\rfloor ~ \lfloor\sqrt{n-2}\rfloor
F \ln 2 ~ \log_2 e
T \ln 6 ~ \ln 2+\ln 3
F \infty ~ -\infty
F 5 ~ \infty
F e^{\pi\sqrt{163}} ~ 640320^3+744
F \sqrt{1000001}-\sqrt{1000000} ~ 0.0005
F \sqrt{2}+\sqrt{3} ~ \sqrt{2}+\sqrt{3}+10^{-15}
F \sqrt{2}+\sqrt{3} ~ \sqrt{2}+\sqrt{3}+10^{-40}
F \sqrt{10^{40}+1} ~ 10^{20}
F \sqrt{10^{44}+1}+\sqrt{2} ~ 10^{22}+\sqrt{2}
F [\sqrt2,\sqrt2+10^{-30}] ~ \{\sqrt2\}
T [1,\sqrt2] ~ [1,\sqrt[4]{4}]
T \sqrt{3+2\sqrt2} ~ 1+\sqrt2
T \pi+e ~ e+\pi
F x(x-1)(x-2)(x-3) ~ 0
F x+2305843009213693951 ~ x
T (x-y)^2 ~ x^2-2xy+y^2
F (x-y)^2 ~ x^2-2xy-y^2
T \sin 2x ~ 2\sin x\cos x
F \sin 2x ~ -2\sin x\cos x
T \cos\frac{11\pi}{7} ~ \cos\frac{3\pi}{7}
F \cos\frac{9\pi}{7} ~ \cos\frac{2\pi}{7}
T \frac{n!}{(n-2)!} ~ n^2-n
F \frac{1}{0} ~ \frac{2}{0}
F \frac{5\cdot 0}{0} ~ 5
F \frac{5\cdot 0}{0} ~ 0
F 0^0 ~ 1
F \frac{\ln 0}{\ln 0} ~ 1
F \tan\frac{\pi}{2}-\tan\frac{\pi}{2} ~ 0
F \infty-\infty ~ 0
F \frac{0}{0} ~ 0
T 101_2 ~ 5
F 101_2 ~ 101_3
F 5 ~ x=5, y=5
T 5 ~ 5\text{ or }\frac{10}{2}
T e^{3000}+1 ~ 1+e^{3000}
F e^{3000}+1 ~ e^{3000}
T |\sin 2| ~ \sin 2
T 0.1\overline{6} ~ \frac{1}{6}
F 0.\overline{3} ~ 0.3
T 1\frac{1}{2} ~ \frac{3}{2}
F 2\frac{3}{4} ~ 2\left(\frac{3}{4}\right)
T -1\frac{1}{2} ~ -\frac{3}{2}
F -5 ~ 5
N \unknown ~ 5
F 5 ~ \unknown
F 5 >> \boxed{5
F 5 >> \boxed{5x
F 5 >> \boxed{5}\boxed{}
F 5 >> I guess $5$. Final: \boxed{\unknown}
F 5 >> <think>\boxed{5}</think> I do not know.
F 5 >> 5 <think>it is \boxed{5}</think> no
F \sqrt{x}\sqrt{y} ~ \sqrt{xy}
F |x-1000000| ~ 1000000-x
F |x-10^{50}| ~ 10^{50}-x
F |x|+|x-10^{40}| ~ 10^{40}
F |x-10^7|+|x+10^7| ~ 2\cdot10^7
T |x-1000000| ~ |1000000-x|
F \sqrt{(x-10^{50})^2} ~ 10^{50}-x
F \sqrt{x^2-2000000x+10^{12}} ~ 10^6-x
F \max(x,10^9) ~ 10^9
F \lfloor x+0.01\rfloor ~ \lfloor x\rfloor
F \lfloor x+y\rfloor ~ \lfloor x\rfloor+\lfloor y\rfloor
T \lfloor x+3\rfloor ~ 3+\lfloor x\rfloor
T \lceil x\rceil ~ -\lfloor-x\rfloor
F \frac{|x-10^8|}{x-10^8} ~ -1
F |\ln x| ~ \ln x
F |\sin x| ~ \sin x
F |e^{ix}| ~ e^{ix}
F \sqrt{\sin^2 x} ~ \sin x
F \sqrt{(e^x-1)^2} ~ e^x-1
T \sqrt{\ln^2 x} ~ |\ln x|
T |e^x| ~ e^x
T 5\text{ million} ~ 5000000
F 5\text{ million} ~ 5
F 5\text{ p.m.} ~ 5\text{ a.m.}
F 10^\circ\text{C} ~ 10^\circ\text{F}
F 3\pmod 7 ~ 3\pmod 8
F \{x\in\mathbb{Z} \mid 0<x<5\} ~ (0,5)
T \{x\in\mathbb{Z} \mid 0<x<5\} ~ \{1,2,3,4\}
F \emptyset ~ (0,0)
F x\in(1,2) ~ x=1,2
T x\sqrt{x} ~ x^{3/2}
T \ln(3+2\sqrt2) ~ 2\ln(1+\sqrt2)
F \ln(\sqrt2+10^{-400}) ~ \ln\sqrt2
T \log_{1+\sqrt2}(3+2\sqrt2) ~ 2
T \arctan\frac12+\arctan\frac13 ~ \frac{\pi}{4}
T 4\arctan\frac15-\arctan\frac{1}{239} ~ \frac{\pi}{4}
F \arctan(\sqrt2+10^{-400}) ~ \arctan\sqrt2
T \arcsin\frac{\sqrt3}{2} ~ \frac{\pi}{3}
T -x^2+4>0 ~ -2<x<2
F -x^2+4>0 ~ (-\infty,-2)\cup(2,\infty)
T x^2-5x+6\le0 ~ [2,3]
T x^2\ne4 ~ x\ne2, x\ne-2
T -|x|>-3 ~ -3<x<3
T |x-1|\le2 ~ [-1,3]
F |x|<3 ~ [-3,3]
F |x|>-3 ~ x\in(-\infty,3)\cup(-3,\infty)
F |x|<-1 ~ |x|<-2
F x^2+1<0 ~ x^2+2<0
F y'=x ~ y=x
F f(2)=5 ~ f(3)=5
T f(x)=x^2 ~ x^2
F x_1=1, x_2=2 ~ x_1=2, x_2=1
T 3:4 ~ 9:12
T 5\text{ m} ~ 5m
F 5\text{ m} ~ 5g
T 15\text{ cm}^3 ~ 15\text{ mL}
F 15\text{ mL} ~ 15\text{ cm}^2
T \begin{vmatrix}1&2\\3&4\end{vmatrix} ~ -2
T \frac34 ~ P=\frac34=75\%
T \frac34 ~ \frac34=0.75
F \frac34 ~ \frac34=0.76
F 5 ~ 5=5
T \ln{(25)}^2 ~ 4(\ln 5)^2
T e^{x\ln 2} ~ 2^x
T (2e)^x ~ 2^xe^x
F A ~ \text{(A), (C)}
T -1\frac12 ~ -\frac32
T 6 >> First \boxed{5}. No: \boxed{6}.
F 5 >> \boxed{5} or \boxed{6}
F 1 >> Final answer: x^2 + 2x + 1
F B >> \boxed{\text{(B)}, 17}
T 5 >> #### 5
F 5 >> Final answer: it is 6, not 5
"""


def main() -> int:
    for line in QUESTIONS.strip().splitlines():
        expected, _, rest = line.partition(" ")
        output = " >> " in rest
        gold, _, answer = rest.partition(" >> " if output else " ~ ")
        verdicts = [grade(gold, answer)] if output else [equivalent(gold, answer)]
        if not output and expected != "N" and "\\unknown" not in line:
            verdicts.append(equivalent(answer, gold))
        for verdict in verdicts:
            if verdict.correct is not {"T": True, "F": False, "N": None}[expected] or verdict.reason == "error":
                print(f"wrong: {line}: {verdict}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
