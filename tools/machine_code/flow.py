"""Control flow: successors of instructions, basic blocks, dominators and loops."""

from collections import defaultdict

# Instructions that end a path, unless predicated.
ENDS = ("EXIT", "RET", "KILL")
JUMPS = ("BRA", "BRX", "JMP", "JMX", "CALL", "WARPSYNC")


def conditional(instruction):
    """Whether a branch may fall through: it has a guard predicate or, like BRA P1, BRA.DIV and BRA.CONV, an operand before its target."""
    if instruction.guard not in ("", "PT"):
        return True
    return instruction.base not in ("BRX", "JMX") and "," in instruction.operands


def falls(instruction):
    """Whether the next instruction can follow. After a call it can: ptxas sets the return address to it."""
    if instruction.base in ENDS or instruction.base in ("BRA", "BRX", "JMP", "JMX"):
        return conditional(instruction)
    return True


def jumps(instruction):
    """Indices of the possible jump targets."""
    return instruction.targets if instruction.base in JUMPS else []


def unclear(kernel):
    """Errors for branches that this analysis cannot follow."""
    ends = defaultdict(set)
    for at in kernel.code:
        if at.base == "BSSY":
            ends[at.operands.split(",")[0]].update(at.targets)
    for index, at in enumerate(kernel.code):
        if at.base in ("BRA", "BRX", "JMP", "JMX", "CALL") and not at.targets:
            yield f"the listing does not say where {at} leads"
        # Control continues at the target of BSSY, which this analysis assumes to be the next instruction.
        if at.base == "BSYNC" and index + 1 not in ends[at.operands]:
            yield f"{at} is not right before where its BSSY leads"


class Blocks:
    """The basic blocks reachable from a kernel's entry, without called functions."""

    def __init__(self, kernel):
        code = kernel.code
        heads = {0}
        for index, at in enumerate(code):
            if at.base in JUMPS or at.base in ENDS:
                heads.update(jumps(at))
                heads.add(index + 1)
        self.begins = sorted(head for head in heads if head < len(code))
        self.ends = self.begins[1:] + [len(code)]
        number = {head: block for block, head in enumerate(self.begins)}
        self.next = []
        for end in self.ends:
            last = code[end - 1]
            targets = [t for t in jumps(last) if not (last.base == "CALL" and t in kernel.functions)]
            self.next.append([number[t] for t in targets] + ([number[end]] if falls(last) and end < len(code) else []))
        self.order = self.reverse_postorder()
        self.before = defaultdict(list)
        for block in self.order:
            for after in self.next[block]:
                self.before[after].append(block)

    def reverse_postorder(self):
        done, order, stack = {0}, [], [(0, iter(self.next[0]))]
        while stack:
            block, rest = stack[-1]
            for after in rest:
                if after not in done:
                    done.add(after)
                    stack.append((after, iter(self.next[after])))
                    break
            else:
                order.append(block)
                stack.pop()
        return order[::-1]

    def dominators(self):
        """Each block's immediate dominator (Cooper, Harvey and Kennedy 2001)."""
        rank = {block: place for place, block in enumerate(self.order)}
        above = {0: 0}

        def common(a, b):
            while a != b:
                while rank[a] > rank[b]:
                    a = above[a]
                while rank[b] > rank[a]:
                    b = above[b]
            return a

        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                new = None
                for before in self.before[block]:
                    if before in above:
                        new = before if new is None else common(before, new)
                if above.get(block) != new:
                    above[block], changed = new, True
        return above

    def loops(self):
        """The natural loops: header to (blocks, latches)."""
        above, found = self.dominators(), {}
        rank = {block: place for place, block in enumerate(self.order)}
        for block in self.order:
            for header in self.next[block]:
                up = block
                while rank[up] > rank[header]:
                    up = above[up]
                if up == header:
                    body, latches = found.setdefault(header, ({header}, set()))
                    latches.add(block)
                    self.fill(body, block)
        return found

    def fill(self, body, block):
        work = [block]
        while work:
            block = work.pop()
            if block not in body:
                body.add(block)
                work += self.before[block]
