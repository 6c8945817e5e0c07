//! Forms (`multipart/form-data`): finds the fields that routing needs and refuses those that are reserved.
//! The form itself reaches the engine byte for byte.

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, header};
use multer::{Constraints, Multipart, SizeLimit};

use crate::openai::{request_error::RequestError, reserved::is_reserved, short_text::shortened};

/// Maximum number of parts of a form.
const MAX_PARTS: usize = 64;
/// Maximum size of a field that is read, bytes.
const MAX_FIELD: u64 = 1_024;

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
pub(super) async fn read(headers: &HeaderMap, body: Bytes) -> Result<(Form, Fields), RequestError> {
    let content_type = headers.get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.unwrap_or(HeaderValue::from_static(""));
    let boundary = content_type.to_str().ok().and_then(|kind| multer::parse_boundary(kind).ok());
    let boundary = boundary.ok_or_else(|| {
        let shown = shortened(&String::from_utf8_lossy(content_type.as_bytes()));
        let problem = format!("`{shown}` is not multipart/form-data with a boundary; send a form");
        RequestError::new("content-type", &problem)
    })?;
    let sizes = SizeLimit::new().for_field("model", MAX_FIELD).for_field("stream", MAX_FIELD);
    let whole = stream::iter([Ok::<_, std::convert::Infallible>(body.clone())]);
    let mut parts = Multipart::with_constraints(whole, boundary, Constraints::new().size_limit(sizes));
    let (mut model, mut stream, mut count) = (None, false, 0);
    while let Some(field) = parts.next_field().await.map_err(|error| invalid("body", &error))? {
        count += 1;
        if count > MAX_PARTS {
            let problem = format!("the form has more than {MAX_PARTS} parts; send fewer");
            return Err(RequestError::new("body", &problem));
        }
        let name = field.name().map(str::to_owned).unwrap_or_default();
        if is_reserved(&name) {
            let problem = "the field is reserved for the gateway; remove it";
            return Err(RequestError::new(&shortened(&name), problem));
        }
        match name.as_str() {
            "model" => model = Some(field.text().await.map_err(|error| invalid("model", &error))?),
            "stream" => {
                let value = field.text().await.map_err(|error| invalid("stream", &error))?;
                stream =
                    matches!(value.to_ascii_lowercase().as_str(), "true" | "1" | "yes" | "on" | "t" | "y");
            }
            _ => {}
        }
    }
    let model = model.filter(|model: &String| !model.is_empty());
    Ok((Form { bytes: body, content_type }, Fields { model, stream }))
}

fn invalid(field: &str, error: &multer::Error) -> RequestError {
    RequestError::new(field, &shortened(&error.to_string()))
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

    async fn problem(parts: &[(&str, &str)]) -> String {
        let (headers, body) = form(parts);
        read(&headers, body).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn the_model_is_found_behind_a_file_and_the_bytes_stay() {
        let file = "\r\n--y\0".repeat(100_000);
        let (headers, body) = form(&[("file", &file), ("stream", "True"), ("model", "m")]);
        let (form, fields) = read(&headers, body.clone()).await.unwrap();
        assert_eq!((form.bytes, fields.model.as_deref(), fields.stream), (body, Some("m"), true));
    }

    #[tokio::test]
    async fn what_is_wrong_with_a_form_is_named() {
        let many: Vec<(&str, &str)> = (0..65).map(|_| ("a", "b")).collect();
        assert_eq!(problem(&many).await, "body: the form has more than 64 parts; send fewer");
        let reserved = "the field is reserved for the gateway; remove it";
        assert_eq!(problem(&[("Request_ID", "x")]).await, format!("Request_ID: {reserved}"));
        assert_eq!(problem(&[("vllm_xargs", "x")]).await, format!("vllm_xargs: {reserved}"));
        assert!(problem(&[("model", &"m".repeat(2_000))]).await.starts_with("model: "));
        let (_, body) = form(&[("model", "m")]);
        let error = read(&HeaderMap::new(), body.clone()).await.unwrap_err().to_string();
        assert!(error.starts_with("content-type: `` is not multipart/form-data"), "{error}");
        let (headers, _) = form(&[]);
        let cut = read(&headers, body.slice(..body.len() - 8)).await.unwrap_err().to_string();
        assert!(cut.contains("incomplete"), "{cut}");
    }
}
