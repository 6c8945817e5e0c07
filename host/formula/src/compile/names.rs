//! Names of facts in a formula: their values, whether they are known, and comparisons of ids and labels.

use super::{
    ABSENT, Binary, Compiler, FLAGS, Fact, Id, Kind, LOAD, Mistake, Node, NodeKind, Operation, Outcome,
    Place, Type, Typed, Unary, WITH_KNOWN,
};

impl Compiler<'_> {
    /// Compiles the name of a fact.
    pub(super) fn name(&mut self, at: usize, name: &str) -> Outcome {
        let fact = self.fact(at, name)?;
        if fact.ty == Type::U64 {
            let text = format!("`{name}` is an id; compare it with `==`, `!=` or `in`");
            return Err(Mistake::new(at, text));
        }
        Ok(self.load(fact))
    }

    fn fact(&self, at: usize, name: &str) -> Result<Fact, Mistake> {
        self.vocabulary.fact(name).ok_or_else(|| {
            let written = self.source.get(at..).and_then(|rest| self.vocabulary.with_dashes(rest));
            let advice = match written {
                Some(written) => format!("write `{written}`"),
                None => self.vocabulary.advice(name),
            };
            Mistake::new(at, format!("unknown name `{name}`; {advice}"))
        })
    }

    fn load(&mut self, fact: Fact) -> Typed {
        self.note(fact);
        let place = self.asked.place(fact.name, fact.is_request, fact.ty);
        self.push(Operation::Load(place, fact.ty == Type::F32));
        let kind = if FLAGS.contains(&fact.name) { Kind::Flag } else { Kind::Number };
        Typed { kind, is_column: !fact.is_request }
    }

    fn note(&mut self, fact: Fact) {
        self.is_load &= LOAD.contains(&fact.name);
    }

    /// Reads a column that is made from a label or a taint: 1 or 0.
    pub(super) fn column(&mut self, name: String) -> Typed {
        self.is_load = false;
        let place = self.asked.place(&name, false, Type::U32);
        self.push(Operation::Load(place, false));
        Typed::flag(true)
    }

    pub(super) fn label_number(&mut self, at: usize, key: &str) -> Outcome {
        if key.is_empty() {
            return Err(Mistake::new(at, "a label needs a key; write `label_number('key')`"));
        }
        self.is_load = false;
        let place = self.asked.place(&format!("label-number/{key}"), false, Type::F32);
        self.push(Operation::Load(place, true));
        Ok(Typed::number(true))
    }

    pub(super) fn known(&mut self, node: &Node) -> Outcome {
        let NodeKind::Name(name) = &node.kind else {
            return Err(Mistake::new(node.at, "expected the name of a fact, as in `known(kv_usage)`"));
        };
        let fact = self.fact(node.at, name)?;
        self.note(fact);
        if WITH_KNOWN.contains(&fact.name) {
            let place = self.asked.place(&format!("{}-known", fact.name), fact.is_request, Type::U32);
            self.push(Operation::Load(place, false));
            return Ok(Typed::flag(!fact.is_request));
        }
        let Some((_, absent)) = ABSENT.iter().find(|(absent, _)| *absent == fact.name) else {
            return self.constant(1.0, Kind::Flag);
        };
        if fact.ty == Type::U64 {
            let place = self.asked.place(fact.name, fact.is_request, fact.ty);
            self.push(Operation::Same(Id::Fact(place), Id::Value((*absent).into())));
        } else {
            self.load(fact);
            #[expect(clippy::cast_precision_loss, reason = "rounded as the fact's values are")]
            self.push(Operation::Number(*absent as f32));
            self.push(Operation::Binary(Binary::Equal));
        }
        self.push(Operation::Unary(Unary::Not));
        Ok(Typed::flag(!fact.is_request))
    }

    /// Compares numbers, ids with names or numbers, or a label with a text.
    pub(super) fn equal(&mut self, left: &Node, right: &Node) -> Outcome {
        let sides = [left, right].map(|node| self.label_of(node));
        match (sides, left, right) {
            ([Some(key), _], _, other) | ([None, Some(key)], other, _) => return self.label(&key, other),
            ([None, None], ..) => {}
        }
        match (self.id(left)?, self.id(right)?) {
            (Some(a), Some(b)) => Ok(self.same(a, b)),
            (Some(id), None) => {
                let value = self.id_value(right)?;
                Ok(self.same(id, Id::Value(value)))
            }
            (None, Some(id)) => {
                let value = self.id_value(left)?;
                Ok(self.same(id, Id::Value(value)))
            }
            (None, None) => {
                let (a, b) = (self.value(left)?, self.value(right)?);
                self.push(Operation::Binary(Binary::Equal));
                Ok(Typed::flag(a.is_column || b.is_column))
            }
        }
    }

    fn same(&mut self, a: Id, b: Id) -> Typed {
        self.push(Operation::Same(a, b));
        let is_column = |id| matches!(id, Id::Fact(Place::Worker(_)));
        Typed::flag(is_column(a) || is_column(b))
    }

    /// Returns the id that a node names, if it does.
    fn id(&mut self, node: &Node) -> Result<Option<Id>, Mistake> {
        let NodeKind::Name(name) = &node.kind else { return Ok(None) };
        let fact = self.fact(node.at, name)?;
        if fact.ty != Type::U64 {
            return Ok(None);
        }
        self.note(fact);
        Ok(Some(Id::Fact(self.asked.place(fact.name, fact.is_request, fact.ty))))
    }

    /// Returns the value that an id is compared with: a number, or the hash of a name.
    fn id_value(&self, node: &Node) -> Result<u64, Mistake> {
        match &node.kind {
            NodeKind::Number(_, Some(number)) => Ok(*number),
            NodeKind::Text(text) => self.names.get(text).copied().ok_or_else(|| {
                Mistake::new(node.at, format!("the hash of '{text}' is missing in the setting `names`"))
            }),
            _ => Err(Mistake::new(
                node.at,
                "expected a text in quotes or a whole number, since it is compared with an id",
            )),
        }
    }

    /// Returns the key of `label('key')`.
    fn label_of(&self, node: &Node) -> Option<String> {
        match &node.kind {
            NodeKind::Call(name, arguments) if name == "label" => match arguments.as_slice() {
                [Node { kind: NodeKind::Text(key), .. }] if !key.is_empty() => Some(key.clone()),
                _ => None,
            },
            _ => None,
        }
    }

    fn label(&mut self, key: &str, other: &Node) -> Outcome {
        match &other.kind {
            NodeKind::Text(value) => Ok(self.column(format!("label-is/{key}={value}"))),
            _ => Err(Mistake::new(other.at, "expected a text in quotes, since it is compared with a label")),
        }
    }
}
