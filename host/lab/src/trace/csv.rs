//! CSV with a header. Columns are found by their names, in any order.

use std::collections::HashMap;

use super::{MAX_TOKENS, ReadLines, TraceRequest, dropped::Dropped};

/// Separators of columns; that of a file is the one that its header has most often.
const SEPARATORS: [char; 3] = ['\t', ';', ','];

/// Reads a request from a row.
type Read = fn(&Row<'_>) -> Result<TraceRequest, String>;

/// Reads the lines of a CSV file.
pub(super) struct Reader {
    /// Columns that the file must have.
    needed: &'static [&'static str],
    /// Columns that the file may have beside them.
    others: &'static [&'static str],
    read: Read,
    header: Option<Header>,
    dropped: Dropped,
}

struct Header {
    text: String,
    separator: char,
    /// Number of columns, with those that have no name.
    columns: usize,
    /// Position of each column, by its name in lower case.
    places: HashMap<String, usize>,
    /// Names and positions of the columns that have no effect.
    dropped: Vec<(String, usize)>,
}

/// One line with its header.
pub(super) struct Row<'a> {
    header: &'a Header,
    fields: Vec<String>,
}

impl Reader {
    pub(super) fn new(needed: &'static [&'static str], others: &'static [&'static str], read: Read) -> Self {
        Self { needed, others, read, header: None, dropped: Dropped::default() }
    }
}

impl ReadLines for Reader {
    fn line(&mut self, text: &str, _block_tokens: u32) -> Result<Option<TraceRequest>, String> {
        let Some(header) = &self.header else {
            self.header = Some(Header::of(text, self.needed, self.others)?);
            return Ok(None);
        };
        // Files that were joined have their header again.
        if text == header.text {
            return Ok(None);
        }
        let fields = fields(text, header.separator)?;
        if fields.len() > header.columns {
            return Err(format!("has {} fields; the header has {}", fields.len(), header.columns));
        }
        for (name, place) in &header.dropped {
            self.dropped.look_at_column(name, fields.get(*place).map_or("", String::as_str));
        }
        (self.read)(&Row { header, fields }).map(Some)
    }

    fn dropped(&self) -> Dropped {
        self.dropped.clone()
    }
}

impl Header {
    fn of(text: &str, needed: &[&str], others: &[&str]) -> Result<Self, String> {
        let separator = SEPARATORS.into_iter().max_by_key(|one| text.matches(*one).count()).unwrap_or(',');
        let names = fields(text, separator)?;
        let mut places = HashMap::new();
        for (place, name) in names.iter().enumerate() {
            // Spreadsheets write columns without a name.
            if !name.is_empty() && places.insert(name.to_lowercase(), place).is_some() {
                return Err(format!("the header has the column `{name}` twice"));
            }
        }
        let missing = needed.iter().find(|name| !places.contains_key(&name.to_lowercase()));
        match missing {
            None => {
                let is_known =
                    |name: &str| needed.iter().chain(others).any(|known| known.eq_ignore_ascii_case(name));
                let unknown =
                    names.iter().enumerate().filter(|(_, name)| !name.is_empty() && !is_known(name));
                let dropped = unknown.map(|(place, name)| (name.clone(), place)).collect();
                Ok(Self { text: text.to_owned(), separator, columns: names.len(), places, dropped })
            }
            Some(name) => {
                Err(format!("the header has no column `{name}`; its columns are `{}`", names.join("`, `")))
            }
        }
    }
}

impl Row<'_> {
    /// Returns a field, or `None` if it is empty, or if the file has no such column.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let place = self.header.places.get(&name.to_lowercase())?;
        self.fields.get(*place).map(String::as_str).filter(|text| !text.is_empty())
    }

    /// Returns a field that must not be empty.
    pub(super) fn text(&self, name: &str) -> Result<&str, String> {
        self.get(name).ok_or_else(|| format!("`{name}` is missing"))
    }

    /// Returns a number of tokens, which some programs write as `12.0`.
    pub(super) fn tokens(&self, name: &str, least: u32) -> Result<u32, String> {
        let text = self.text(name)?;
        let whole = text.strip_suffix(".0").unwrap_or(text);
        let number: u64 =
            whole.parse().map_err(|_| format!("`{name}` is \"{text}\"; expected a whole number"))?;
        let tokens = u32::try_from(number).ok().filter(|tokens| (least..=MAX_TOKENS).contains(tokens));
        tokens.ok_or_else(|| format!("`{name}` is {number}; expected {least} to {MAX_TOKENS}"))
    }
}

/// Splits a line into its fields, without blanks around them. A field in quotes may have separators in it,
/// and two quotes for one.
fn fields(line: &str, separator: char) -> Result<Vec<String>, String> {
    let mut fields = vec![String::new()];
    let (mut quoted, mut letters) = (false, line.chars().peekable());
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.next_if_eq(&'"').is_none() => quoted = false,
            '"' if !quoted => quoted = true,
            letter if letter == separator && !quoted => fields.push(String::new()),
            letter => fields.iter_mut().next_back().into_iter().for_each(|field| field.push(letter)),
        }
    }
    if quoted {
        return Err("a quote is not closed in this line".to_owned());
    }
    Ok(fields.iter().map(|field| field.trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_keep_separators_and_quotes_in_a_field() {
        let of = |line: &str| fields(line, ',').unwrap();
        assert_eq!(of(r#" a ,"b, c",,"say ""x""""#), ["a", "b, c", "", r#"say "x""#]);
        assert_eq!(of(""), [""]);
        assert!(fields("a,\"b", ',').unwrap_err().contains("not closed"));
    }
}
