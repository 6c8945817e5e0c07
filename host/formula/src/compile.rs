//! Checks a tree and turns it into operations on a stack.

use crate::{
    MAX_OPERATIONS, Names,
    columns::{Binary, Fold, Unary},
    parse::{Node, NodeKind, Operator, parse},
    position::Mistake,
    vocabulary::{ABSENT, FLAGS, FUNCTIONS, Fact, LOAD, Type, Vocabulary, WITH_KNOWN, closest},
};

mod names;

/// Number of operations that `exp` and `log` count as.
pub(crate) const SLOW: usize = 8;

/// Purpose of a formula: what its result means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A number for each candidate.
    Cost,
    /// A condition for each candidate.
    Keep,
    /// A condition on the request.
    Shed,
}

/// A compiled formula.
#[derive(Clone, Debug)]
pub struct Formula {
    pub(crate) role: Role,
    pub(crate) operations: Vec<Operation>,
    /// Operations, `exp` and `log` weighed.
    pub(crate) work: usize,
    /// Whether it reads nothing but load of workers.
    pub(crate) is_load: bool,
}

/// One step. Operands are taken from the stack, and the result is put there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operation {
    Number(f32),
    Load(Place, bool),
    /// Whether an id is equal to another one.
    Same(Id, Id),
    Unary(Unary),
    Binary(Binary),
    /// Condition, value if it holds, value if not.
    Select,
    Fold(Fold),
}

/// Place of a fact's values in the inputs: the number of the value or column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Request(usize),
    Worker(usize),
}

/// A fact of 64 bits, or a value that it is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    Fact(Place),
    Value(u64),
}

/// The facts that formulas ask for, in the order of their values.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub(crate) request: Vec<(String, Type)>,
    pub(crate) worker: Vec<(String, Type)>,
}

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Number,
    Flag,
}

/// A value on the stack.
#[derive(Clone, Copy, Debug)]
struct Typed {
    kind: Kind,
    /// Whether each candidate has a value of its own.
    is_column: bool,
}

struct Compiler<'a> {
    vocabulary: &'a Vocabulary,
    source: &'a str,
    names: &'a Names,
    asked: &'a mut Asked,
    operations: Vec<Operation>,
    work: usize,
    is_load: bool,
}

type Outcome = Result<Typed, Mistake>;

impl Formula {
    /// Compiles a formula. Adds the facts that it reads to `asked`. `names` has the hashes of its texts.
    ///
    /// # Errors
    /// The first mistake.
    pub fn new(
        source: &str,
        role: Role,
        vocabulary: &Vocabulary,
        names: &Names,
        asked: &mut Asked,
    ) -> Result<Self, Mistake> {
        let node = parse(source)?;
        let (operations, work, is_load) = (Vec::new(), 0, true);
        let mut compiler = Compiler { vocabulary, source, names, asked, operations, work, is_load };
        let found = compiler.value(&node)?;
        let wrong = |text: &str| Err(Mistake::new(node.at, text));
        match role {
            Role::Cost => {}
            Role::Keep | Role::Shed if found.kind == Kind::Number => {
                return wrong("expected a condition, found a number; compare it, as in `engine_queue < 8`");
            }
            Role::Shed if found.is_column => {
                return wrong(
                    "each candidate has its own value, and a request is rejected for all of them; \
                     use min, max, sum or mean, as in `min(engine_queue) > 40`",
                );
            }
            Role::Keep | Role::Shed => {}
        }
        let Compiler { operations, work, is_load, .. } = compiler;
        if work > MAX_OPERATIONS {
            let text =
                format!("the formula has {work} operations; the limit is {MAX_OPERATIONS}; simplify it");
            return Err(Mistake::new(0, text));
        }
        Ok(Self { role, operations, work, is_load })
    }

    /// Returns the number of its operations. `exp` and `log` count as eight.
    #[must_use]
    pub fn work(&self) -> usize {
        self.work
    }
}

impl Asked {
    /// Returns the names of the request facts and of the worker facts, in the order of their values.
    #[must_use]
    pub fn names(&self) -> [Vec<String>; 2] {
        [&self.request, &self.worker].map(|facts| facts.iter().map(|(name, _)| name.clone()).collect())
    }

    fn place(&mut self, name: &str, is_request: bool, ty: Type) -> Place {
        let facts = if is_request { &mut self.request } else { &mut self.worker };
        let known = facts.iter().position(|(other, _)| other == name);
        let index = known.unwrap_or_else(|| {
            facts.push((name.to_owned(), ty));
            facts.len() - 1
        });
        let before = facts.iter().take(index).map(|(_, ty)| ty.width()).sum();
        if is_request { Place::Request(before) } else { Place::Worker(before) }
    }
}

impl Type {
    pub(crate) fn width(self) -> usize {
        if self == Self::U64 { 2 } else { 1 }
    }
}

impl Typed {
    fn number(is_column: bool) -> Self {
        Self { kind: Kind::Number, is_column }
    }

    fn flag(is_column: bool) -> Self {
        Self { kind: Kind::Flag, is_column }
    }
}

impl Compiler<'_> {
    fn push(&mut self, operation: Operation) {
        self.operations.push(operation);
        self.work += match operation {
            Operation::Number(_) => 0,
            Operation::Unary(Unary::Exp | Unary::Log) => SLOW,
            _ => 1,
        };
    }

    fn value(&mut self, node: &Node) -> Outcome {
        // The left side of `in` is compiled once for each item: few letters can ask for many operations.
        if self.work > MAX_OPERATIONS {
            let text = format!("the formula has more than {MAX_OPERATIONS} operations; simplify it");
            return Err(Mistake::new(node.at, text));
        }
        match &node.kind {
            NodeKind::Number(number, _) => self.constant(*number, Kind::Number),
            NodeKind::Flag(flag) => self.constant(f32::from(u8::from(*flag)), Kind::Flag),
            NodeKind::Text(text) => {
                let advice = "compare it with `tenant`, `session`, `lora` or `label('key')`";
                Err(Mistake::new(node.at, format!("the text '{text}' is not a value; {advice}")))
            }
            NodeKind::Name(name) => self.name(node.at, name),
            NodeKind::Call(name, arguments) => self.call(node.at, name, arguments),
            NodeKind::Not(inner) => {
                let inner = self.condition(inner)?;
                self.push(Operation::Unary(Unary::Not));
                Ok(inner)
            }
            NodeKind::Negate(inner) => {
                let inner = self.value(inner)?;
                self.push(Operation::Unary(Unary::Negate));
                Ok(Typed::number(inner.is_column))
            }
            NodeKind::Binary(operator, left, right) => self.binary(*operator, left, right),
            NodeKind::In(left, items) => self.is_in(node.at, left, items),
            NodeKind::If(nodes) => self.select(nodes),
        }
    }

    fn constant(&mut self, number: f32, kind: Kind) -> Outcome {
        self.push(Operation::Number(number));
        Ok(Typed { kind, is_column: false })
    }

    fn condition(&mut self, node: &Node) -> Outcome {
        let value = self.value(node)?;
        if value.kind == Kind::Flag {
            return Ok(value);
        }
        let text = "expected a condition, found a number; compare it, as in `engine_queue < 8`";
        Err(Mistake::new(node.at, text))
    }

    fn binary(&mut self, operator: Operator, left: &Node, right: &Node) -> Outcome {
        let (operation, is_flag) = match operator {
            Operator::And | Operator::Or => {
                let (a, b) = (self.condition(left)?, self.condition(right)?);
                let is_and = operator == Operator::And;
                self.push(Operation::Binary(if is_and { Binary::Min } else { Binary::Max }));
                return Ok(Typed::flag(a.is_column || b.is_column));
            }
            Operator::Equal => return self.equal(left, right),
            Operator::NotEqual => {
                let found = self.equal(left, right)?;
                self.push(Operation::Unary(Unary::Not));
                return Ok(found);
            }
            Operator::Less => (Binary::Less, true),
            Operator::LessOrEqual => (Binary::LessOrEqual, true),
            Operator::Greater => (Binary::Greater, true),
            Operator::GreaterOrEqual => (Binary::GreaterOrEqual, true),
            Operator::Add => (Binary::Add, false),
            Operator::Subtract => (Binary::Subtract, false),
            Operator::Multiply => (Binary::Multiply, false),
            Operator::Divide => (Binary::Divide, false),
        };
        let (a, b) = (self.value(left)?, self.value(right)?);
        if is_flag && [a, b].iter().any(|side| side.kind == Kind::Flag) {
            let text = "this compares a condition; join two comparisons with `&&`, as in `2 < x && x < 8`";
            return Err(Mistake::new(left.at, text));
        }
        self.push(Operation::Binary(operation));
        let is_column = a.is_column || b.is_column;
        Ok(if is_flag { Typed::flag(is_column) } else { Typed::number(is_column) })
    }

    fn is_in(&mut self, at: usize, left: &Node, items: &[Node]) -> Outcome {
        let Some((first, rest)) = items.split_first() else {
            return Err(Mistake::new(at, "the list is empty; add a text or a number"));
        };
        let mut found = self.equal(left, first)?;
        for item in rest {
            let next = self.equal(left, item)?;
            self.push(Operation::Binary(Binary::Max));
            found.is_column |= next.is_column;
        }
        Ok(found)
    }

    fn select(&mut self, [condition, yes, no]: &[Node; 3]) -> Outcome {
        let condition = self.condition(condition)?;
        let (yes, no) = (self.value(yes)?, self.value(no)?);
        self.push(Operation::Select);
        let is_column = condition.is_column || yes.is_column || no.is_column;
        let is_flag = yes.kind == Kind::Flag && no.kind == Kind::Flag;
        Ok(if is_flag { Typed::flag(is_column) } else { Typed::number(is_column) })
    }

    fn call(&mut self, at: usize, name: &str, arguments: &[Node]) -> Outcome {
        let fold = match name {
            "min" => Some((Fold::Min, Some(Binary::Min))),
            "max" => Some((Fold::Max, Some(Binary::Max))),
            "sum" => Some((Fold::Sum, None)),
            "mean" => Some((Fold::Mean, None)),
            _ => None,
        };
        match (name, fold, arguments) {
            (_, Some((fold, _)), [of]) => {
                self.value(of)?;
                self.push(Operation::Fold(fold));
                Ok(Typed::number(false))
            }
            (_, Some((_, Some(operation))), [a, b]) => self.numbers(a, b, operation),
            ("ratio", _, [a, b]) => self.numbers(a, b, Binary::Ratio),
            ("if", _, [condition, yes, no]) => self.select(&[condition.clone(), yes.clone(), no.clone()]),
            ("exp" | "log", _, [of]) => {
                let of = self.value(of)?;
                self.push(Operation::Unary(if name == "exp" { Unary::Exp } else { Unary::Log }));
                Ok(Typed::number(of.is_column))
            }
            ("clamp", _, [of, low, high]) => {
                let raised = self.numbers(of, low, Binary::Max)?;
                let high = self.value(high)?;
                self.push(Operation::Binary(Binary::Min));
                Ok(Typed::number(raised.is_column || high.is_column))
            }
            ("known", _, [fact]) => self.known(fact),
            ("taint", _, [Node { kind: NodeKind::Text(taint), .. }]) => {
                Ok(self.column(format!("taint-is/{taint}")))
            }
            ("label_number", _, [Node { kind: NodeKind::Text(key), at }]) => self.label_number(*at, key),
            ("label", _, [Node { kind: NodeKind::Text(_), .. }]) => {
                Err(Mistake::new(at, "a label is a text; compare it, as in `label('zone') == 'a'`"))
            }
            _ => Err(self.wrong_call(at, name)),
        }
    }

    fn numbers(&mut self, a: &Node, b: &Node, operation: Binary) -> Outcome {
        let (a, b) = (self.value(a)?, self.value(b)?);
        self.push(Operation::Binary(operation));
        Ok(Typed::number(a.is_column || b.is_column))
    }

    fn wrong_call(&self, at: usize, name: &str) -> Mistake {
        if let Some((_, usage)) = FUNCTIONS.iter().find(|(function, _)| *function == name) {
            return Mistake::new(at, format!("wrong arguments of `{name}`; write {usage}"));
        }
        if self.vocabulary.fact(name).is_some() {
            return Mistake::new(
                at,
                format!("`{name}` is a fact and not a function; remove the parentheses"),
            );
        }
        let functions = FUNCTIONS.iter().map(|(function, _)| (*function).to_owned());
        let advice = match closest(name, functions.clone()) {
            Some(found) => format!("did you mean `{found}`?"),
            None => format!("expected one of {}", functions.collect::<Vec<_>>().join(", ")),
        };
        Mistake::new(at, format!("unknown function `{name}`; {advice}"))
    }
}

#[cfg(test)]
mod tests;
