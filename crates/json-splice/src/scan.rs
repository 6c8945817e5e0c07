//! Finds a JSON object's top-level members in one pass, and checks everything in it on the way.
//!
//! Accepts what serde_json accepts within [`MAX_KEYS`] and [`MAX_DEPTH`], and nothing else (a property test
//! and a fuzz target hold the two beside each other); it is here because of prompts. Long strings are most of
//! a body, and are passed in strides that the compiler makes SIMD of. It does not explain what is wrong with
//! the syntax of a body: serde_json has the better messages.
//!
//! It counts what each member contains, so that limits apply before anything is allocated for the content.

use std::{mem, ops::Range};

/// Largest number of keys at the top level.
pub const MAX_KEYS: usize = 1_024;
/// Largest depth of lists and objects within each other, the top level not counted. Python's and serde_json's
/// parsers stop at 128 or above.
pub const MAX_DEPTH: usize = 100;

/// Largest number of objects in lists of a body whose ends are noted: more are not worth the memory.
const MAX_ENDS: usize = 4_096;

/// Minimum length of a string whose place is noted, bytes, with its quotes.
pub const MIN_LONG_STRING: usize = 1_024;
/// Largest number of long strings of a body whose places are noted: more are not worth the memory.
const MAX_LONG_STRINGS: usize = 4_096;

/// Number of members for which a list has room at first. The allocator is slower from 1 KB on.
const INITIAL_MEMBERS: usize = 12;

/// A member of the top level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) key: Key,
    /// Value of the member.
    pub(super) value: Range<usize>,
    /// Content of the value.
    pub(super) counts: Counts,
    /// Ends of the objects in the list in the value, from its beginning on. Ends beyond [`MAX_ENDS`] are
    /// missing.
    pub(super) object_ends: Vec<u32>,
}

/// A key of the top level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Range of the key in the text, without its quotes.
    Written(Range<usize>),
    /// The decoded key, which the text writes with escapes.
    Unescaped(Box<str>),
}

/// Numbers of values within a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Elements of the list, or members of the object, that the value is; 0 for anything else.
    pub items: usize,
    /// All values in it, on every level; 1 for a string or a number.
    pub values: usize,
}

/// What the scan finds in a text.
#[derive(Debug)]
pub(super) struct Scanned {
    pub(super) members: Vec<Member>,
    /// Starts and ends of the first [`MAX_LONG_STRINGS`] long strings, quotes included.
    pub(super) long_strings: Vec<(u32, u32)>,
}

/// Why a text has no members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The text is not a valid object.
    Syntax,
    /// The object has more than [`MAX_KEYS`] keys.
    Keys,
    /// The object is nested deeper than [`MAX_DEPTH`].
    Depth,
}

/// Finds the members of the object that `text` is, and the long strings in their values.
///
/// # Errors
/// [`Fault`].
pub(super) fn scan(text: &str) -> Result<Scanned, Fault> {
    let mut scan = Scan {
        bytes: text.as_bytes(),
        at: 0,
        open: Vec::new(),
        counts: Counts::default(),
        start: 0,
        ends: Vec::new(),
        ends_left: MAX_ENDS,
        long_strings: Vec::new(),
        fault: Fault::Syntax,
    };
    let members = read_members(&mut scan, text).ok_or(scan.fault)?;
    Ok(Scanned { members, long_strings: scan.long_strings })
}

fn read_members(scan: &mut Scan<'_>, text: &str) -> Option<Vec<Member>> {
    let mut members = Vec::with_capacity(INITIAL_MEMBERS);
    scan.blank();
    scan.expect_byte(b'{')?;
    scan.blank();
    if scan.peek()? == b'}' {
        scan.at += 1;
        return scan.end().then_some(members);
    }
    loop {
        if members.len() == MAX_KEYS {
            scan.fault = Fault::Keys;
            return None;
        }
        let (quoted, has_escapes) = scan.name()?;
        let key = if has_escapes {
            // Its escapes may mean nothing.
            Key::Unescaped(serde_json::from_str(text.get(quoted)?).ok()?)
        } else {
            Key::Written(quoted.start + 1..quoted.end.checked_sub(1)?)
        };
        scan.blank();
        let start = scan.at;
        (scan.start, scan.counts) = (start, Counts::default());
        scan.value()?;
        let object_ends = mem::take(&mut scan.ends);
        members.push(Member { key, value: start..scan.at, counts: scan.counts, object_ends });
        scan.blank();
        match scan.next()? {
            b',' => scan.blank(),
            b'}' => return scan.end().then_some(members),
            _ => return None,
        }
    }
}

struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Closing brackets of the lists and objects within the value that is passed over. A stack replaces
    /// recursion, however deep they are.
    open: Vec<u8>,
    /// Counts of the member that is passed.
    counts: Counts,
    /// Start of the member's value.
    start: usize,
    /// Ends of the objects in the list that it is.
    ends: Vec<u32>,
    /// Number of ends that may still be noted.
    ends_left: usize,
    /// Starts and ends of the long strings.
    long_strings: Vec<(u32, u32)>,
    /// Why the text is refused, should it be.
    fault: Fault,
}

impl Scan<'_> {
    /// Passes a value.
    fn value(&mut self) -> Option<()> {
        loop {
            self.blank();
            self.counts.values += 1;
            match self.next()? {
                b'"' => {
                    let start = self.at - 1;
                    self.string()?;
                    if self.at - start >= MIN_LONG_STRING {
                        self.note_long_string(start);
                    }
                }
                b'[' => {
                    if self.opens(b']')? {
                        continue;
                    }
                }
                b'{' => {
                    if self.opens(b'}')? {
                        self.name()?;
                        continue;
                    }
                }
                b't' => self.word(b"rue")?,
                b'f' => self.word(b"alse")?,
                b'n' => self.word(b"ull")?,
                b'-' => {
                    let first = self.next()?;
                    self.number(first)?;
                }
                first => self.number(first)?,
            }
            if self.closes()? {
                return Some(());
            }
        }
    }

    /// Behind an opening bracket: whether something is within. Empty values are passed over. `None` when it
    /// is too deep.
    fn opens(&mut self, close: u8) -> Option<bool> {
        self.blank();
        if self.peek() == Some(close) {
            self.at += 1;
            return Some(false);
        }
        if self.open.len() == MAX_DEPTH {
            self.fault = Fault::Depth;
            return None;
        }
        self.open.push(close);
        self.counts.items += usize::from(self.open.len() == 1);
        Some(true)
    }

    /// Behind a value within others: closes what ends with it. Whether that was all; else the next value
    /// follows.
    fn closes(&mut self) -> Option<bool> {
        while let Some(close) = self.open.last().copied() {
            if close == b']' && self.open.len() == 1 {
                self.note_end();
            }
            self.blank();
            match self.next()? {
                b',' => {
                    self.counts.items += usize::from(self.open.len() == 1);
                    if close == b'}' {
                        self.blank();
                        self.name()?;
                    }
                    return Some(false);
                }
                byte if byte == close => drop(self.open.pop()),
                _ => return None,
            }
        }
        Some(true)
    }

    /// Notes the end of a list's item. The scan stands after the item.
    fn note_end(&mut self) {
        let is_object = self.at.checked_sub(1).and_then(|last| self.bytes.get(last)) == Some(&b'}');
        if is_object && self.ends_left > 0 {
            self.ends_left -= 1;
            self.ends.extend(u32::try_from(self.at - self.start).ok());
        }
    }

    /// Notes the place of a long string that began at `start`. The scan stands after the string.
    fn note_long_string(&mut self, start: usize) {
        let place = u32::try_from(start).ok().zip(u32::try_from(self.at).ok());
        let has_room = self.long_strings.len() < MAX_LONG_STRINGS;
        self.long_strings.extend(place.filter(|_| has_room));
    }

    /// Passes a key and its colon; the key's place, quotes included, and whether it has escapes.
    fn name(&mut self) -> Option<(Range<usize>, bool)> {
        let start = self.at;
        self.expect_byte(b'"')?;
        let has_escapes = self.string()?;
        let key = start..self.at;
        self.blank();
        self.expect_byte(b':')?;
        Some((key, has_escapes))
    }

    /// Passes a string after its opening quote; whether it has escapes.
    fn string(&mut self) -> Option<bool> {
        let mut has_escapes = false;
        loop {
            self.at += plain(self.bytes.get(self.at..)?);
            match self.next()? {
                b'"' => return Some(has_escapes),
                b'\\' => {
                    has_escapes = true;
                    self.escape()?;
                }
                _ => return None,
            }
        }
    }

    fn escape(&mut self) -> Option<()> {
        match self.next()? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(()),
            b'u' => {
                let digits = self.bytes.get(self.at..self.at + 4)?;
                self.at += 4;
                digits.iter().all(u8::is_ascii_hexdigit).then_some(())
            }
            _ => None,
        }
    }

    /// Passes a number whose first digit is `first`.
    fn number(&mut self, first: u8) -> Option<()> {
        match first {
            b'0' if self.peek().is_some_and(|next| next.is_ascii_digit()) => return None,
            b'0' => {}
            b'1'..=b'9' => self.digits(),
            _ => return None,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.some_digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.some_digits()?;
        }
        Some(())
    }

    fn some_digits(&mut self) -> Option<()> {
        self.next().filter(u8::is_ascii_digit)?;
        self.digits();
        Some(())
    }

    fn digits(&mut self) {
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
    }

    fn word(&mut self, rest: &[u8]) -> Option<()> {
        let is = self.bytes.get(self.at..)?.starts_with(rest);
        self.at += rest.len();
        is.then_some(())
    }

    fn blank(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    /// Returns whether nothing but white space follows.
    fn end(&mut self) -> bool {
        self.blank();
        self.at == self.bytes.len()
    }

    fn expect_byte(&mut self, byte: u8) -> Option<()> {
        self.next().filter(|next| *next == byte).map(|_| ())
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }
}

/// Returns the number of bytes before the first quote, backslash or control character.
fn plain(bytes: &[u8]) -> usize {
    const STRIDE: usize = 64;
    let (near, far) = bytes.split_at(bytes.len().min(STRIDE));
    // Prompts with many escapes: the next is close, and strides would be for nothing.
    if let Some(at) = by_words(near) {
        return at;
    }
    let (strides, _) = far.as_chunks::<STRIDE>();
    let passed =
        strides.iter().take_while(|stride| !stride.iter().fold(false, |any, byte| any | stops(*byte)));
    let passed = near.len() + passed.count() * STRIDE;
    let rest = bytes.get(passed..).unwrap_or_default();
    passed + by_words(rest).unwrap_or(rest.len())
}

/// Whether a byte is a quote, a backslash or a control character. With its second bit inverted, a quote is a
/// space and a space is a quote, so that one comparison finds quotes and control characters.
fn stops(byte: u8) -> bool {
    (byte ^ (b'"' ^ b' ') <= b' ') | (byte == b'\\')
}

/// The place of the first byte that stops, eight bytes at a time.
fn by_words(bytes: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::MAX / 255;
    let zero = |word: u64| word.wrapping_sub(ONES) & !word;
    let (words, rest) = bytes.as_chunks::<8>();
    for (place, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let control = word.wrapping_sub(ONES * u64::from(b' ')) & !word;
        let any = control | zero(word ^ (ONES * u64::from(b'"'))) | zero(word ^ (ONES * u64::from(b'\\')));
        // The highest bit of a byte says that it stops; above the first one, borrows may set others.
        let any = any & (ONES << 7);
        if any != 0 {
            return Some(place * 8 + any.trailing_zeros() as usize / 8);
        }
    }
    let from = bytes.len() - rest.len();
    rest.iter().position(|byte| stops(*byte)).map(|at| from + at)
}

#[cfg(test)]
mod tests;
