//! Forms (`multipart/form-data`): finds the fields that routing needs and refuses those that are reserved.
//! The form itself reaches the engine byte for byte.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};

use crate::openai::{request_error::RequestError, reserved::is_reserved, short_text::shortened};

mod parts;

use parts::Part;

/// Maximum size of a field that is read, bytes.
const MAX_FIELD: usize = 1_024;

/// A form as the client wrote it.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    /// The whole body.
    pub bytes: Bytes,
    /// The content type, which names the boundary of the parts.
    pub content_type: HeaderValue,
}

/// Fields of a form that routing needs.
#[derive(Debug, Default)]
pub(super) struct Fields {
    pub(super) model: Option<String>,
    pub(super) stream: bool,
}

/// Reads a form. A file in it is passed over.
///
/// # Errors
/// [`RequestError`] names the field.
pub(super) fn read(headers: &HeaderMap, body: Bytes) -> Result<(Form, Fields), RequestError> {
    let content_type = headers.get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.unwrap_or(HeaderValue::from_static(""));
    let boundary = content_type.to_str().ok().and_then(parts::boundary);
    let boundary = boundary.ok_or_else(|| {
        let shown = shortened(&String::from_utf8_lossy(content_type.as_bytes()));
        let problem = format!("`{shown}` is not multipart/form-data with one boundary in UTF-8; send a form");
        RequestError::new("content-type", &problem)
    })?;
    let (mut model, mut stream) = (None, None);
    for part in parts::parts(&body, boundary).map_err(|problem| RequestError::new("body", &problem))? {
        if is_reserved(part.name) {
            let problem = "the field is reserved for the gateway; remove it";
            return Err(RequestError::new(&shortened(part.name), problem));
        }
        let field = match part.name {
            "model" => &mut model,
            "stream" => &mut stream,
            _ => continue,
        };
        if field.replace(text(&part)?).is_some() {
            return Err(RequestError::new(part.name, "the field is there more than once; send it once"));
        }
    }
    let fields = Fields {
        model: model.filter(|model| !model.is_empty()).map(str::to_owned),
        stream: stream.map_or(Ok(false), truth)?,
    };
    Ok((Form { bytes: body, content_type }, fields))
}

fn text<'a>(part: &Part<'a>) -> Result<&'a str, RequestError> {
    let text = std::str::from_utf8(part.content).ok().filter(|text| !part.is_file && text.len() <= MAX_FIELD);
    let problem = "the field is not a text; send at most 1024 bytes of UTF-8, not a file";
    text.ok_or_else(|| RequestError::new(part.name, problem))
}

/// Reads a boolean as the engines do.
fn truth(text: &str) -> Result<bool, RequestError> {
    match &*text.to_ascii_lowercase() {
        "true" | "1" | "yes" | "on" | "t" | "y" => Ok(true),
        "false" | "0" | "no" | "off" | "f" | "n" | "" => Ok(false),
        _ => Err(RequestError::new("stream", "the field is not a boolean; send `true` or `false`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(parts: &[(&str, &str)]) -> (HeaderMap, Bytes) {
        let one = |(name, value): &(&str, &str)| {
            format!("--x\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
        };
        let body: String = parts.iter().map(one).collect::<String>() + "--x--\r\n";
        let kind = HeaderValue::from_static("multipart/form-data; boundary=x");
        ([(header::CONTENT_TYPE, kind)].into_iter().collect(), body.into())
    }

    fn problem(parts: &[(&str, &str)]) -> String {
        let (headers, body) = form(parts);
        read(&headers, body).unwrap_err().to_string()
    }

    #[test]
    fn the_model_is_found_behind_a_file_and_the_bytes_stay() {
        let file = "\r\n--y\0".repeat(100_000);
        let (headers, body) = form(&[("file", &file), ("stream", "True"), ("model", "m")]);
        let (form, fields) = read(&headers, body.clone()).unwrap();
        assert_eq!((form.bytes, fields.model.as_deref(), fields.stream), (body, Some("m"), true));
    }

    #[test]
    fn what_is_wrong_with_a_form_is_named() {
        let many: Vec<(&str, &str)> = (0..65).map(|_| ("a", "b")).collect();
        assert_eq!(problem(&many), "body: the form has more than 64 parts; send fewer");
        let reserved = "the field is reserved for the gateway; remove it";
        assert_eq!(problem(&[("Request_ID", "x")]), format!("Request_ID: {reserved}"));
        assert_eq!(problem(&[("vllm_xargs", "x")]), format!("vllm_xargs: {reserved}"));
        assert!(problem(&[("model", &"m".repeat(2_000))]).starts_with("model: "));
        let (_, body) = form(&[("model", "m")]);
        let error = read(&HeaderMap::new(), body.clone()).unwrap_err().to_string();
        assert!(error.starts_with("content-type: `` is not multipart/form-data"), "{error}");
        let (headers, _) = form(&[]);
        let cut = read(&headers, body.slice(..body.len() - 8)).unwrap_err().to_string();
        assert_eq!(cut, "body: part 1 of the form has no end");
        for (name, value) in [("model", "m"), ("stream", "false")] {
            // I6.17
            let twice = problem(&[(name, value), ("file", "x"), (name, value)]);
            assert_eq!(twice, format!("{name}: the field is there more than once; send it once"));
        }
        let a_file = problem(&[("model\"; filename=\"a", "m")]);
        assert!(a_file.starts_with("model: the field is not a text"), "{a_file}");
        assert!(problem(&[("stream", " true")]).starts_with("stream: the field is not a boolean"));
        let hidden = problem(&[("model", "m"), ("x\"; NAME=\"model", "big")]);
        assert!(hidden.starts_with("body: part 2 of the form needs a header"), "{hidden}");
    }
}
