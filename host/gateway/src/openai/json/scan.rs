//! Finds a JSON object's top-level members in one pass, and checks everything in it on the way.
//!
//! Accepts what serde_json accepts, and nothing else (a property test and a fuzz target hold the two beside
//! each other); it is here because of prompts. Long strings are most of a body, and are passed in strides
//! that the compiler makes SIMD of. It does not explain what is wrong with a body: serde_json has the better
//! messages.

use std::ops::Range;

/// A member of the top level.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// Its key, quotes included.
    pub(super) key: Range<usize>,
    /// Its value.
    pub(super) value: Range<usize>,
}

/// The members of the object that `text` is; `None` when it is not a valid object.
pub(super) fn members(text: &str) -> Option<Vec<Member>> {
    let mut scan = Scan { bytes: text.as_bytes(), at: 0, open: Vec::new() };
    let mut members = Vec::with_capacity(16);
    scan.blank();
    scan.take(b'{')?;
    scan.blank();
    if scan.peek()? == b'}' {
        scan.at += 1;
        return scan.end().then_some(members);
    }
    loop {
        let key = scan.name()?;
        scan.blank();
        let start = scan.at;
        scan.value()?;
        members.push(Member { key, value: start..scan.at });
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
    /// What closes the lists and objects within the value that is passed: no recursion, however deep they
    /// are.
    open: Vec<u8>,
}

impl Scan<'_> {
    /// Passes a value.
    fn value(&mut self) -> Option<()> {
        loop {
            self.blank();
            match self.next()? {
                b'"' => self.string()?,
                b'[' if self.opens(b']') => continue,
                b'{' if self.opens(b'}') => {
                    self.name()?;
                    continue;
                }
                b'[' | b'{' => {}
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

    /// Behind an opening bracket: whether something is within. What is empty is passed.
    fn opens(&mut self, close: u8) -> bool {
        self.blank();
        if self.peek() == Some(close) {
            self.at += 1;
            return false;
        }
        self.open.push(close);
        true
    }

    /// Behind a value within others: closes what ends with it. Whether that was all; else the next value
    /// follows.
    fn closes(&mut self) -> Option<bool> {
        while let Some(close) = self.open.last().copied() {
            self.blank();
            match self.next()? {
                b',' => {
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

    /// Passes a key and its colon; the key's place, quotes included.
    fn name(&mut self) -> Option<Range<usize>> {
        let start = self.at;
        self.take(b'"')?;
        self.string()?;
        let key = start..self.at;
        self.blank();
        self.take(b':')?;
        Some(key)
    }

    /// Passes a string behind its opening quote.
    fn string(&mut self) -> Option<()> {
        loop {
            self.at += plain(self.bytes.get(self.at..)?);
            match self.next()? {
                b'"' => return Some(()),
                b'\\' => self.escape()?,
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

    /// Whether nothing but white space follows.
    fn end(&mut self) -> bool {
        self.blank();
        self.at == self.bytes.len()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
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

/// How many bytes from the start need no look: up to a quote, a backslash or a control character.
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

fn stops(byte: u8) -> bool {
    (byte == b'"') | (byte == b'\\') | (byte < b' ')
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
mod tests {
    use std::fmt;

    use proptest::prelude::*;
    use serde::{
        Deserialize, Deserializer,
        de::{MapAccess, Visitor},
    };
    use serde_json::value::RawValue;

    use super::*;

    /// Values as serde_json finds them; keys are looked at apart.
    struct Values<'a>(Vec<&'a RawValue>);

    impl<'de: 'a, 'a> Deserialize<'de> for Values<'a> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Each<'a>(std::marker::PhantomData<&'a ()>);

            impl<'de: 'a, 'a> Visitor<'de> for Each<'a> {
                type Value = Values<'a>;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("an object")
                }

                fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Values<'a>, M::Error> {
                    let mut values = Vec::new();
                    while let Some((_, value)) = map.next_entry::<&RawValue, &RawValue>()? {
                        values.push(value);
                    }
                    Ok(Values(values))
                }
            }

            deserializer.deserialize_map(Each(std::marker::PhantomData))
        }
    }

    /// serde_json's word.
    fn serde(text: &str) -> Option<Vec<(usize, usize)>> {
        let Values(values) = serde_json::from_str(text).ok()?;
        let at = |raw: &RawValue| raw.get().as_ptr() as usize - text.as_ptr() as usize;
        Some(values.iter().map(|raw| (at(raw), at(raw) + raw.get().len())).collect())
    }

    fn ours(text: &str) -> Option<Vec<(usize, usize)>> {
        Some(members(text)?.iter().map(|member| (member.value.start, member.value.end)).collect())
    }

    #[test]
    fn it_takes_what_serde_json_takes() {
        let long = "x".repeat(200);
        let texts = [
            "{}",
            " {\t} \n",
            "{\"a\":1}",
            "{\"a\":01}",
            "{\"a\":-}",
            "{\"a\":-0.0e+1}",
            "{\"a\":1.}",
            "{\"a\":.1}",
            "{\"a\":1e}",
            "{\"a\":+1}",
            "{\"a\":tru}",
            "{\"a\":true,}",
            "{,}",
            "{\"a\"}",
            "{\"a\":}",
            "[]",
            "1",
            "",
            "{\"a\":[]}",
            "{\"a\":[1,]}",
            "{\"a\":[,]}",
            "{\"a\":[[[]]],\"b\":{\"c\":{}}}",
            "{\"a\":[}",
            "{\"a\":{]}",
            "{\"a\":{\"b\" : 1 , \"c\":[ 1 , 2 ]} }",
            "{\"a\":{1:2}}",
            "{\"a\":\"\u{7f}\u{e9}\u{1F600}\"}",
            "{\"a\":\"\t\"}",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\u12\"}",
            "{\"a\":\"\\ud800\"}",
            "{\"a\":\"\\u00e9\"}",
            "{\"a\":\"",
            "{\"a\":\"\\",
            "{\"a\":\"\\u",
            "{\"a\":n",
            "{\"a\":null}x",
            "{\"a\":null} ",
            "{'a':1}",
            "{\"a\":NaN}",
            "{\"a\":1 2}",
            "\u{feff}{}",
            "{\"a\":1}{",
            "{\"a\":\"b\"c}",
            "{\"\\n\":1}",
        ];
        for text in texts {
            assert_eq!(ours(text), serde(text), "{text}");
            let inner = format!("{{\"p\":\"{long}\",\"q\":[{text}]}}");
            assert_eq!(ours(&inner), serde(&inner), "{inner}");
        }
    }

    #[test]
    fn a_string_of_any_length_ends_where_it_ends() {
        for length in 0..300 {
            for end in ["\"", "\\\"\"", "\n\"", "\u{1f}\"", "\u{e9}\"", " \"", "!\"", "[\""] {
                let text = format!("{{\"k\":\"{}{end}}}", "y".repeat(length));
                assert_eq!(ours(&text), serde(&text), "{text}");
            }
        }
    }

    #[test]
    fn depth_costs_no_stack() {
        let text = format!("{{\"a\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
        assert_eq!(ours(&text), Some(vec![(5, 400_005)]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]
        #[test]
        fn it_takes_what_serde_json_takes_of_anything(text in "\\{\"a\":[\\[\\]{}\",:0-9eE.+\\- \\\\tfnulrase\u{1}]{0,24}\\}") {
            prop_assert_eq!(ours(&text), serde(&text));
        }
    }
}
