//! YAML with the line of each value, within bounds. JSON is YAML, too.
//!
//! The bounds hold for what a document becomes, not for its text: an alias counts as all that it stands for.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser};

/// Maximum number of values in a file. The values behind each alias count again.
const MAX_NODES: usize = 50_000;
/// Maximum size of all texts in a file, bytes. Texts behind aliases count again.
const MAX_TEXT: usize = 8 * 1024 * 1024;
/// Maximum depth of nested values.
const MAX_DEPTH: usize = 64;
/// Maximum number of documents in a file.
const MAX_DOCUMENTS: usize = 100;

/// A value and its line, from 1. The line of a block of lines (`|`) is its first one.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) line: usize,
    pub(crate) value: Value,
}

/// Kind of a node.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// A text that may stand for a number or a truth value.
    Scalar(String),
    List(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

/// A key of a map.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    pub(crate) text: String,
    pub(crate) line: usize,
}

impl Node {
    /// Returns the text of a scalar; `None` for lists, maps and nothing.
    pub(crate) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(text) if !matches!(text.as_str(), "" | "~" | "null") => Some(text),
            _ => None,
        }
    }

    /// Returns the elements of a list; none for anything else.
    pub(crate) fn list(&self) -> &[Node] {
        if let Value::List(nodes) = &self.value { nodes } else { &[] }
    }

    /// Returns the entries of a map; none for anything else.
    pub(crate) fn entries(&self) -> &[(Key, Node)] {
        if let Value::Map(entries) = &self.value { entries } else { &[] }
    }

    /// Returns the value of a key of a map.
    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        self.entries().iter().find(|(own, _)| own.text == key).map(|(_, node)| node)
    }

    /// Returns whether the node is neither a list nor a map and has no text.
    pub(crate) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar(_)) && self.text().is_none()
    }

    /// Adds to the lines of all values, for a document within another one.
    pub(crate) fn move_down(&mut self, lines: usize) {
        self.line += lines;
        match &mut self.value {
            Value::Scalar(_) => {}
            Value::List(nodes) => nodes.iter_mut().for_each(|node| node.move_down(lines)),
            Value::Map(entries) => entries.iter_mut().for_each(|(key, node)| {
                key.line += lines;
                node.move_down(lines);
            }),
        }
    }

    /// Returns the number of values and the bytes of texts.
    fn size(&self) -> (usize, usize) {
        let inner = match &self.value {
            Value::Scalar(text) => (0, text.len()),
            Value::List(nodes) => sum(nodes.iter().map(Self::size)),
            Value::Map(entries) => sum(entries.iter().map(|(key, node)| {
                let (nodes, bytes) = node.size();
                (nodes, bytes + key.text.len())
            })),
        };
        (inner.0 + 1, inner.1)
    }
}

fn sum(sizes: impl Iterator<Item = (usize, usize)>) -> (usize, usize) {
    sizes.fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1))
}

/// Parses the documents of a file.
///
/// # Errors
/// The line and what is wrong: the syntax, a bound, an unknown alias, a key twice.
pub(crate) fn parse(text: &str) -> Result<Vec<Node>, String> {
    let mut builder =
        Builder { parser: Parser::new_from_str(text), anchors: HashMap::new(), nodes: 0, bytes: 0 };
    builder.documents()
}

struct Builder<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    /// Values by the id of their anchor.
    anchors: HashMap<usize, Node>,
    nodes: usize,
    bytes: usize,
}

/// An event with its line.
type Located<'a> = (Event<'a>, usize);

impl<'a> Builder<'a> {
    fn documents(&mut self) -> Result<Vec<Node>, String> {
        let mut documents = Vec::new();
        loop {
            match self.next()? {
                (Event::StreamEnd, _) => return Ok(documents),
                (Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing, _) => {}
                event => {
                    if documents.len() >= MAX_DOCUMENTS {
                        return Err(format!("line {}: more than {MAX_DOCUMENTS} documents", event.1));
                    }
                    let document = self.node(event, 0)?;
                    documents.push(document);
                    self.anchors.clear();
                }
            }
        }
    }

    fn next(&mut self) -> Result<Located<'a>, String> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => Ok((event, span.start.line())),
            Some(Err(error)) => Err(format!("line {}: {}", error.marker().line(), error.info())),
            None => Ok((Event::StreamEnd, 0)),
        }
    }

    /// Builds the value that begins with an event.
    fn node(&mut self, (event, line): Located<'a>, depth: usize) -> Result<Node, String> {
        if depth >= MAX_DEPTH {
            return Err(format!("line {line}: more than {MAX_DEPTH} levels of lists and maps"));
        }
        let (value, anchor) = match event {
            Event::Scalar(text, _, anchor, _) => {
                self.count(1, text.len(), line)?;
                (Value::Scalar(text.into_owned()), anchor)
            }
            Event::SequenceStart(anchor, _) => {
                self.count(1, 0, line)?;
                (Value::List(self.list(depth)?), anchor)
            }
            Event::MappingStart(anchor, _) => {
                self.count(1, 0, line)?;
                (Value::Map(self.map(depth)?), anchor)
            }
            Event::Alias(id) => return self.alias(id, line),
            _ => return Err(format!("line {line}: a value is missing")),
        };
        let node = Node { line, value };
        if anchor > 0 {
            let (nodes, bytes) = node.size();
            self.count(nodes, bytes, line)?;
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Node>, String> {
        let mut nodes = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(nodes),
                event => nodes.push(self.node(event, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Vec<(Key, Node)>, String> {
        let mut entries: Vec<(Key, Node)> = Vec::new();
        let mut known = std::collections::HashSet::new();
        loop {
            let (event, line) = self.next()?;
            let key = match event {
                Event::MappingEnd => return Ok(entries),
                Event::Scalar(text, _, 0, _) => Key { text: text.into_owned(), line },
                _ => return Err(format!("line {line}: a key is not a plain text")),
            };
            if key.text == "<<" {
                return Err(format!("line {line}: merge keys (`<<`) are not read: write the keys out"));
            }
            self.count(0, key.text.len(), line)?;
            if !known.insert(key.text.clone()) {
                let shown = crate::report::plain(&key.text);
                return Err(format!("line {line}: the key `{shown}` appears twice"));
            }
            let event = self.next()?;
            let node = self.node(event, depth + 1)?;
            entries.push((key, node));
        }
    }

    fn alias(&mut self, id: usize, line: usize) -> Result<Node, String> {
        let Some(node) = self.anchors.get(&id) else {
            return Err(format!("line {line}: an alias within what it stands for"));
        };
        let (nodes, bytes) = node.size();
        // Counted before it is copied.
        self.nodes += nodes;
        self.bytes += bytes;
        check(self.nodes, self.bytes, line)?;
        Ok(self.anchors.get(&id).cloned().unwrap_or(Node { line, value: Value::List(Vec::new()) }))
    }

    fn count(&mut self, nodes: usize, bytes: usize, line: usize) -> Result<(), String> {
        self.nodes += nodes;
        self.bytes += bytes;
        check(self.nodes, self.bytes, line)
    }
}

fn check(nodes: usize, bytes: usize, line: usize) -> Result<(), String> {
    if nodes > MAX_NODES {
        return Err(format!("line {line}: more than {MAX_NODES} values, those of aliases counted again"));
    }
    if bytes > MAX_TEXT {
        return Err(format!(
            "line {line}: more than {MAX_TEXT} bytes of texts, those of aliases counted again"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
