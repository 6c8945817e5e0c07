//! Parts of a form (RFC 7578). The gateway and an engine have to read the same fields, and their parsers
//! differ where a form departs from what browsers and HTTP libraries write. Such a form is refused.

use memchr::memmem;

/// Maximum number of parts of a form.
const MAX_PARTS: usize = 64;
/// Maximum length of a boundary, bytes (RFC 2046, 5.1.1).
const MAX_BOUNDARY: usize = 70;
/// Maximum size of the headers of a part with the blank line behind them, bytes.
const MAX_HEAD: usize = 8 * 1024;
/// Parameters that `content-disposition` may have, each once. Jersey sends those of RFC 2183, too.
const PARAMETERS: [&str; 7] =
    ["name", "filename", "filename*", "size", "creation-date", "modification-date", "read-date"];

#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) name: &'a str,
    pub(super) is_file: bool,
    pub(super) content: &'a [u8],
}

/// Returns the boundary of the parts. Another `charset` than UTF-8 would change the names of fields.
pub(super) fn boundary(content_type: &str) -> Option<&str> {
    let (kind, rest) = content_type.split_at_checked("multipart/form-data".len())?;
    let mut boundary = None;
    for (key, value) in parameters(rest).filter(|_| kind.eq_ignore_ascii_case("multipart/form-data"))? {
        match key {
            "boundary" if boundary.is_none() => boundary = Some(value),
            "charset" if value.eq_ignore_ascii_case("utf-8") => {}
            _ => return None,
        }
    }
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=?".contains(&byte);
    boundary.filter(|text| (1..=MAX_BOUNDARY).contains(&text.len()) && text.bytes().all(fits))
}

/// Returns the parts of a form.
///
/// # Errors
/// What is wrong with the form.
pub(super) fn parts<'a>(body: &'a [u8], boundary: &str) -> Result<Vec<Part<'a>>, String> {
    let delimiter = format!("--{boundary}").into_bytes();
    let find = memmem::Finder::new(&delimiter);
    let begin = body.strip_prefix(b"\r\n").unwrap_or(body).strip_prefix(&*delimiter);
    let mut rest = begin.ok_or("the form does not begin with its boundary")?;
    let mut parts = Vec::new();
    while let Some(text) = rest.strip_prefix(b"\r\n") {
        if parts.len() == MAX_PARTS {
            return Err(format!("the form has more than {MAX_PARTS} parts; send fewer"));
        }
        let problem = |what| format!("part {} of the form {what}", parts.len() + 1);
        let end = find.find(text).ok_or_else(|| problem("has no end"))?;
        let (text, next) = text.split_at(end);
        rest = next.strip_prefix(&*delimiter).unwrap_or_default();
        let text = text.strip_suffix(b"\r\n").ok_or_else(|| problem("contains the boundary"))?;
        let part = part(text).map_err(problem)?;
        parts.push(part);
    }
    let is_end = rest.strip_prefix(b"--").is_some_and(|rest| rest.trim_ascii().is_empty());
    if is_end { Ok(parts) } else { Err("the form does not end with its boundary and `--`".to_owned()) }
}

fn part(text: &[u8]) -> Result<Part<'_>, &'static str> {
    // Splitting headers takes more memory than they have bytes.
    let begin = text.get(..MAX_HEAD).unwrap_or(text);
    let blank = memmem::find(begin, b"\r\n\r\n")
        .ok_or("has no blank line in its first 8 KiB; end its headers with one, or shorten them")?;
    let (head, content) = text.split_at(blank);
    let content = content.strip_prefix(b"\r\n\r\n").unwrap_or_default();
    let head = std::str::from_utf8(head).map_err(|_| "has a header that is not UTF-8")?;
    let mut named = None;
    for line in head.split("\r\n") {
        let (key, value) = header(line).ok_or("has a line that is not a header")?;
        if key.eq_ignore_ascii_case("content-disposition") {
            if named.is_some() {
                return Err("has two headers `content-disposition`");
            }
            let problem = "needs a header `content-disposition: form-data; name=\"NAME\"`, with a name of letters, \
                           digits, `_`, `-`, `.`, `[` and `]`, and besides it at most the name, the size and the dates \
                           of a file";
            named = Some(disposition(value).ok_or(problem)?);
        }
        let is_plain = || ["7bit", "8bit", "binary"].iter().any(|plain| value.eq_ignore_ascii_case(plain));
        if key.eq_ignore_ascii_case("content-transfer-encoding") && !is_plain() {
            return Err("has a transfer encoding; send its bytes as they are");
        }
    }
    let (name, is_file) = named.ok_or("has no header `content-disposition`")?;
    Ok(Part { name, is_file, content })
}

/// Splits a line; `None` for one that is folded, or has a character that ends a line elsewhere.
fn header(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(':')?;
    let is_name = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let is_text = !value.chars().any(|char| char.is_control() && char != '\t');
    (is_name && is_text).then(|| (key, value.trim_matches([' ', '\t'])))
}

/// Returns the name of a field, and whether the field is a file.
fn disposition(value: &str) -> Option<(&str, bool)> {
    let parameters = parameters(value.strip_prefix("form-data")?)?;
    let is_once = |key: &str| parameters.iter().filter(|(other, _)| *other == key).count() == 1;
    let is_known = |&(key, _): &(&str, &str)| PARAMETERS.contains(&key) && is_once(key);
    let (_, name) = parameters.iter().find(|(key, _)| *key == "name")?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.[]".contains(&byte);
    let is_name = !name.is_empty() && name.bytes().all(fits);
    let is_file = parameters.iter().any(|(key, _)| matches!(*key, "filename" | "filename*"));
    // Python-multipart reads the text of `filename="a\\"; name="b"` past its end, and so another name.
    let mut before_name = parameters.iter().take_while(|(key, _)| *key != "name");
    let may_extend = before_name.any(|(_, text)| text.contains('\\'));
    // A parser that reads `\"` as the end of the text could find another parameter in such a text.
    let may_hide = |(_, text): &(&str, &str)| text.contains(';') && text.contains('=');
    let is_safe = parameters.iter().all(is_known) && !may_extend && !parameters.iter().any(may_hide);
    (is_name && is_safe).then_some((*name, is_file))
}

/// Splits `; key=value; key="value"`. Values keep their escapes.
fn parameters(mut text: &str) -> Option<Vec<(&str, &str)>> {
    let mut found = Vec::new();
    while !text.is_empty() {
        let (key, rest) = text.strip_prefix(';')?.trim_start_matches(' ').split_once('=')?;
        let (value, rest) = match rest.strip_prefix('"') {
            Some(quoted) => {
                let (value, rest) = quoted.split_at(quoted_length(quoted)?);
                (value, rest.strip_prefix('"')?)
            }
            None => rest.split_at(rest.find([';', '"', ' ']).unwrap_or(rest.len())),
        };
        found.push((key, value));
        text = rest;
    }
    Some(found)
}

/// Returns where the quote is that ends a text: one without a backslash before it.
fn quoted_length(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(disposition: &str) -> Option<(String, bool)> {
        let body = format!("--x\r\nContent-Disposition: {disposition}\r\n\r\nm\r\n--x--\r\n");
        let parts = parts(body.as_bytes(), "x").ok()?;
        let [part] = &*parts else { panic!("{disposition}: {parts:?}") };
        assert_eq!(part.content, b"m");
        Some((part.name.to_owned(), part.is_file))
    }

    #[test]
    fn i6_forms_of_browsers_and_libraries_are_read() {
        // curl, browsers, requests, httpx, Go; .NET; aiohttp; urllib3 1; Jersey
        for disposition in [
            r#"form-data; name="file"; filename="a.wav""#,
            r#"form-data; name="file"; filename="a \"b\" \\ c; d.wav""#,
            r#"form-data; name="file"; filename="a=%22b%22 ä.wav""#,
            "form-data; name=file; filename=a.wav; filename*=utf-8''a.wav",
            r#"form-data; name="file"; filename*=utf-8''a%20b.wav; filename="a b.wav""#,
            "form-data;name=file;filename*=utf-8''%C3%A4.wav",
            r#"form-data; filename="a.wav"; name="file""#,
            r#"form-data; filename="a.wav"; modification-date="Sun, 1 Nov 2026 13:25:09 GMT"; size=12; name="file""#,
            r#"form-data; size=1; name=file; read-date="x"; filename="a \"b\".wav"; creation-date="y""#,
        ] {
            // I6.17
            assert_eq!(read(disposition), Some(("file".to_owned(), true)), "{disposition}");
        }
        let array = r#"form-data; name="timestamp_granularities[]""#;
        assert_eq!(read(array), Some(("timestamp_granularities[]".to_owned(), false)));
        for (kind, found) in [
            ("multipart/form-data; boundary=----WebKitFormBoundary7MA", Some("----WebKitFormBoundary7MA")),
            ("Multipart/Form-Data;boundary=\"===1==\"; charset=UTF-8", Some("===1==")),
            ("multipart/form-data; boundary=x; boundary=y", None),
            ("multipart/form-data; boundary=x; charset=utf-7", None),
            ("multipart/form-data; Boundary=x", None),
            ("multipart/form-data; boundary=\"a\\b\"", None),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data", None),
            ("multipart/mixed; boundary=x", None),
        ] {
            assert_eq!(boundary(kind), found, "{kind}");
        }
        for (begin, end) in [("", "--"), ("\r\n", "--\r\n"), ("", "--\r\n\r\n")] {
            let body =
                format!("{begin}--x\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n\r\n--x{end}");
            assert_eq!(parts(body.as_bytes(), "x").unwrap().len(), 1, "{body:?}");
        }
        assert!(parts(b"--x--\r\n", "x").unwrap().is_empty());
    }

    #[test]
    fn i6_what_parsers_read_differently_is_refused() {
        for disposition in [
            r#"form-data; NAME="model""#,
            r#"form-data; name="x"; name="model""#,
            r#"form-data; name ="model""#,
            r#"form-data; name= "model""#,
            r#"form-data; name*=utf-8''model"#,
            r#"form-data; name="mod\el""#,
            r#"form-data; name=" model""#,
            r#"form-data; name="%6Dodel""#,
            r#"form-data; name="""#,
            r#"form-data; name="x" name="model""#,
            r#"form-data; filename="a""#,
            r#"form-data; filename="a"; name="x"; name="model""#,
            r#"form-data; filename="a\\"; name="model""#,
            r#"form-data; filename="a \"b\""; name="model""#,
            r#"form-data; size="\\"; filename="a"; name="model""#,
            r#"form-data; filename="a; name=x"; name="model""#,
            r#"form-data; name="x"; size="a; name=model""#,
            r#"form-data; size=1; size=2; name="model""#,
            r#"form-data; Size=1; name="model""#,
            r#"form-data; name="x"; filename="a"; name="model""#,
            r#"form-data; name="x"; filename="a\"; name=model; x=\"""#,
            r#"form-data; name="x"; filename="a"; filename="b""#,
            r#"form-data; name="x"; filename*0="a""#,
            r#"attachment; name="model""#,
            "form-data",
            "form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"",
            "form-data; name=\"x\"\r\n ; name=\"model\"",
            "form-data; name=\"x\"\ncontent-disposition: form-data; name=\"model\"",
            "form-data; name=\"x\"\r\ncontent-transfer-encoding: base64",
        ] {
            // I6.17
            assert_eq!(read(disposition), None, "{disposition}");
        }
        let part = "--x\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n";
        for body in [
            format!("--y {part}b\r\n--x--"),
            format!("{part}b\r\n--x --"),
            format!("{part}b\n--x\r\n--x--"),
            format!("{part}--x--"),
            format!("{part}b\r\n--x"),
            format!("{part}b\r\n--x--{part}b\r\n--x--"),
            format!("--x \r\n{}b\r\n--x--", part.trim_start_matches("--x\r\n")),
            part.to_owned(),
            String::new(),
        ] {
            assert!(parts(body.as_bytes(), "x").is_err(), "{body:?}");
        }
    }

    #[test]
    fn i6_large_headers_of_a_part_are_refused_unread() {
        let with_head = |head: &str| format!("--x\r\n{head}\r\n\r\nm\r\n--x--");
        let name = "content-disposition: form-data; name=\"a\"\r\ny: ";
        let longest = format!("{name}{}", "y".repeat(MAX_HEAD - 4 - name.len()));
        // I6.17
        assert_eq!(parts(with_head(&longest).as_bytes(), "x").unwrap().len(), 1);
        // Reading the parameters would find another error than their size.
        let many = format!("content-disposition: form-data{}", ";=".repeat(4 << 20));
        for head in [format!("{longest}y"), many] {
            let error = parts(with_head(&head).as_bytes(), "x").unwrap_err();
            assert!(error.starts_with("part 1 of the form has no blank line in its first 8 KiB"), "{error}");
        }
        let no_head = parts(b"--x\r\nm\r\n--x--", "x").unwrap_err();
        assert!(no_head.starts_with("part 1 of the form has no blank line"), "{no_head}");
    }
}
