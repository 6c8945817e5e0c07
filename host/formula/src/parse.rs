//! Parses a formula into a tree. The grammar is the part of CEL that has numbers, conditions and texts.

use crate::{MAX_DEPTH, MAX_LENGTH, position::Mistake};

/// A part of a formula.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    /// Offset in the formula, bytes.
    pub(crate) at: usize,
    pub(crate) kind: NodeKind,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum NodeKind {
    /// A number, and its digits when it is a whole one.
    Number(f32, Option<u64>),
    Flag(bool),
    Text(String),
    Name(String),
    Call(String, Vec<Node>),
    Not(Box<Node>),
    Negate(Box<Node>),
    Binary(Operator, Box<Node>, Box<Node>),
    In(Box<Node>, Vec<Node>),
    If(Box<[Node; 3]>),
}

/// An operator between two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Or,
    And,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Equal,
    NotEqual,
    Add,
    Subtract,
    Multiply,
    Divide,
}

/// Maximum number of operator characters in a formula. It bounds the depth of the syntax tree.
const MAX_OPERATORS: usize = 512;

/// Parses `formula`.
pub(crate) fn parse(formula: &str) -> Result<Node, Mistake> {
    check_size(formula)?;
    grammar::whole(formula).map_err(|error| {
        let at = error.location.offset;
        let (before, rest) = formula.split_at_checked(at).unwrap_or((formula, ""));
        let wanted = wanted(error.expected.tokens(), before);
        Mistake::new(at, format!("expected {wanted}; found {}{}", found(rest), hint(rest)))
    })
}

/// Tokens with which a value begins, as the grammar names them.
const VALUE_TOKENS: [&str; 7] = ["a number", "a name", "\"!\"", "\"-\"", "\"(\"", "\"'\"", "\"\\\"\""];

/// Lists what may follow `before`. All beginnings of a value are one entry.
fn wanted(tokens: impl Iterator<Item = &'static str>, before: &str) -> String {
    let mut tokens: Vec<&str> = tokens.collect();
    tokens.sort_unstable();
    let is_value = tokens.contains(&"a number");
    tokens.retain(|token| !is_value || !VALUE_TOKENS.contains(token));
    let shown =
        tokens.into_iter().map(|token| match token.strip_prefix('"').and_then(|t| t.strip_suffix('"')) {
            Some(literal) => format!("`{literal}`"),
            None if token == "EOF" => "the end of the formula".to_owned(),
            None => token.to_owned(),
        });
    let value = is_value.then(|| "a number, a fact, a function, a text or `(`".to_owned());
    let mut wanted = value.into_iter().chain(shown).collect::<Vec<_>>().join(", ");
    if let Some(last) = last_token(before).filter(|_| is_value) {
        wanted.push_str(&format!(" after `{last}`"));
    }
    wanted
}

/// Returns the last operator, word or sign of a text.
fn last_token(text: &str) -> Option<&str> {
    let text = text.trim_end();
    let last = text.chars().next_back()?;
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let is_operator = |letter: char| "+-*/<>=!&|".contains(letter);
    let rest = match last {
        letter if is_word(letter) => text.trim_end_matches(is_word),
        letter if is_operator(letter) => text.trim_end_matches(is_operator),
        letter => text.strip_suffix(letter)?,
    };
    text.get(rest.len()..)
}

/// Checks length, nesting and the number of operators, which bound the recursion of what follows.
fn check_size(formula: &str) -> Result<(), Mistake> {
    if formula.len() > MAX_LENGTH {
        let text = format!("the formula has {} bytes; the limit is {MAX_LENGTH}", formula.len());
        return Err(Mistake::new(MAX_LENGTH, text));
    }
    let (mut depth, mut cases, mut signs, mut operators, mut lists) = (0_usize, 0, 0, 0, 0);
    let mut letters = formula.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            quote @ ('"' | '\'') => {
                while let Some((_, letter)) = letters.next().filter(|(_, letter)| *letter != quote) {
                    if letter == '\\' {
                        letters.next();
                    }
                }
            }
            '(' => depth += 1,
            // A chain of `in` nests, too, and each of them has a list.
            '[' => (depth, lists) = (depth + 1, lists + 1),
            ')' | ']' => depth = depth.saturating_sub(1),
            '?' => cases += 1,
            _ => {}
        }
        signs = match letter {
            '!' | '-' => signs + 1,
            letter if letter.is_whitespace() => signs,
            _ => 0,
        };
        operators += usize::from("+-*/<>=!&|".contains(letter));
        if depth.max(cases).max(signs).max(lists) > MAX_DEPTH {
            let text = format!("the formula is nested deeper than {MAX_DEPTH} levels; simplify it");
            return Err(Mistake::new(at, text));
        }
        if operators > MAX_OPERATORS {
            let text =
                format!("the formula has more than {MAX_OPERATORS} characters of operators; simplify it");
            return Err(Mistake::new(at, text));
        }
    }
    Ok(())
}

peg::parser! {
    grammar grammar() for str {
        pub(crate) rule whole() -> Node = _ node:expression() _ { node }

        rule expression() -> Node
            = condition:operation() cases:cases()? {
                match cases {
                    None => condition,
                    Some((at, yes, no)) => Node { at, kind: NodeKind::If(Box::new([condition, yes, no])) },
                }
            }

        rule cases() -> (usize, Node, Node)
            = _ at:position!() "?" _ yes:expression() _ ":" _ no:expression() { (at, yes, no) }

        rule operation() -> Node = precedence! {
            a:(@) at:op(<"||">) b:@ { binary(at, Operator::Or, a, b) }
            --
            a:(@) at:op(<"&&">) b:@ { binary(at, Operator::And, a, b) }
            --
            a:(@) at:op(<"<=">) b:@ { binary(at, Operator::LessOrEqual, a, b) }
            a:(@) at:op(<">=">) b:@ { binary(at, Operator::GreaterOrEqual, a, b) }
            a:(@) at:op(<"==">) b:@ { binary(at, Operator::Equal, a, b) }
            a:(@) at:op(<"!=">) b:@ { binary(at, Operator::NotEqual, a, b) }
            a:(@) at:op(<"<">) b:@ { binary(at, Operator::Less, a, b) }
            a:(@) at:op(<">">) b:@ { binary(at, Operator::Greater, a, b) }
            a:@ at:op(<"in">) "[" items:items() "]" { Node { at, kind: NodeKind::In(Box::new(a), items) } }
            --
            a:(@) at:op(<"+">) b:@ { binary(at, Operator::Add, a, b) }
            a:(@) at:op(<"-">) b:@ { binary(at, Operator::Subtract, a, b) }
            --
            a:(@) at:op(<"*">) b:@ { binary(at, Operator::Multiply, a, b) }
            a:(@) at:op(<"/">) b:@ { binary(at, Operator::Divide, a, b) }
            --
            at:position!() "!" _ a:@ { Node { at, kind: NodeKind::Not(Box::new(a)) } }
            at:position!() "-" _ a:@ { Node { at, kind: NodeKind::Negate(Box::new(a)) } }
            --
            node:operand() { node }
            "(" _ node:expression() _ ")" { node }
        }

        /// An operator with spaces around it: its offset.
        rule op(text: rule<()>) -> usize
            = _ at:position!() token(text) { at }

        rule token(text: rule<()>) = quiet!{ text() _ } / expected!("an operator")

        rule operand() -> Node
            = at:position!() kind:(number() / text() / name()) { Node { at, kind } }

        rule number() -> NodeKind
            = digits:$(quiet!{
                ['0'..='9']+ ("." ['0'..='9']+)? (['e' | 'E'] ['+' | '-']? ['0'..='9']+)?
            }) {
                let number: f32 = digits.parse().unwrap_or(f32::MAX);
                NodeKind::Number(number.min(f32::MAX), digits.parse().ok())
            }
            / expected!("a number")

        rule text() -> NodeKind
            = "\"" letters:letter('"')* "\"" { NodeKind::Text(letters.into_iter().collect()) }
            / "'" letters:letter('\'')* "'" { NodeKind::Text(letters.into_iter().collect()) }

        rule letter(quote: char) -> char
            = quiet!{ "\\" letter:[_] { letter } / letter:[_] {? if letter == quote { Err("") } else { Ok(letter) } } }
            / expected!("a quote that ends the text")

        rule name() -> NodeKind
            = name:word() arguments:(_ "(" items:items() ")" { items })? {
                match (name, arguments) {
                    ("true", None) => NodeKind::Flag(true),
                    ("false", None) => NodeKind::Flag(false),
                    (name, None) => NodeKind::Name(name.to_owned()),
                    (name, Some(arguments)) => NodeKind::Call(name.to_owned(), arguments),
                }
            }

        rule word() -> &'input str
            = $(quiet!{ ['a'..='z' | 'A'..='Z' | '_'] ['a'..='z' | 'A'..='Z' | '_' | '0'..='9']* })
            / expected!("a name")

        rule items() -> Vec<Node> = _ items:(expression() ** (_ "," _)) _ { items }

        rule _ = quiet!{ [letter if letter.is_whitespace()]* }
    }
}

fn binary(at: usize, operator: Operator, left: Node, right: Node) -> Node {
    Node { at, kind: NodeKind::Binary(operator, Box::new(left), Box::new(right)) }
}

/// Names the token at which a formula cannot continue.
fn found(rest: &str) -> String {
    let part = |letter: &char| letter.is_ascii_alphanumeric() || *letter == '_';
    let word: String = rest.chars().take_while(part).collect();
    match (rest.chars().next(), word.is_empty()) {
        (None, _) => "the end of the formula".to_owned(),
        (Some(first), true) => format!("`{first}`"),
        (Some(_), false) => format!("`{word}`"),
    }
}

fn hint(rest: &str) -> &'static str {
    let next = |text: &str| rest.starts_with(text);
    match rest.split_ascii_whitespace().next().unwrap_or_default() {
        "and" => "; write `&&`",
        "or" => "; write `||`",
        "not" => "; write `!`",
        _ if next("=") => "; write `==` to compare",
        _ if next("&") => "; write `&&`",
        _ if next("|") => "; write `||`",
        _ => "",
    }
}

impl Node {
    /// Collects the texts in it.
    pub(crate) fn texts(&self, into: &mut Vec<String>) {
        match &self.kind {
            NodeKind::Text(text) if !into.contains(text) => into.push(text.clone()),
            NodeKind::Number(..) | NodeKind::Flag(_) | NodeKind::Text(_) | NodeKind::Name(_) => {}
            NodeKind::Call(_, nodes) => nodes.iter().for_each(|node| node.texts(into)),
            NodeKind::Not(node) | NodeKind::Negate(node) => node.texts(into),
            NodeKind::Binary(_, left, right) => [left, right].iter().for_each(|node| node.texts(into)),
            NodeKind::In(left, nodes) => {
                left.texts(into);
                nodes.iter().for_each(|node| node.texts(into));
            }
            NodeKind::If(nodes) => nodes.iter().for_each(|node| node.texts(into)),
        }
    }
}

#[cfg(test)]
mod tests;
