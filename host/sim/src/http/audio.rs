//! `/v1/audio/transcriptions` and `/v1/audio/translations`: the request is a form with a file, and the
//! answer's text contains the size of the file. `/v1/audio/speech`: the answer has the bytes of the text.

use std::convert::Infallible;

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use multer::Multipart;
use serde::Deserialize;
use serde_json::json;

use super::{
    answer::EVENT_STREAM,
    call::{Call, Refused},
    json as answer,
};
use crate::failure::Failure;

/// Fields of the form.
#[derive(Default)]
struct Asked {
    model: String,
    format: String,
    stream: bool,
    file: Option<usize>,
}

/// Body of `/v1/audio/speech`.
#[derive(Deserialize)]
struct Speech {
    model: Option<String>,
    input: String,
}

/// Answers `/v1/audio/speech` with a file whose samples are the bytes of the text, in chunks.
pub(super) async fn speech(call: Call) -> Result<Response, Refused> {
    let asked = call.read(|asked: &Speech| asked.model.as_ref()).await?;
    let samples = asked.input.into_bytes().into_iter().map(|byte| Bytes::from(vec![byte, 0]));
    let chunks = [Bytes::from_static(b"RIFF\xff\xff\xff\xffWAVE")].into_iter().chain(samples);
    let body = Body::from_stream(stream::iter(chunks.map(Ok::<_, Infallible>)));
    Ok(([(header::CONTENT_TYPE, "audio/wav")], body).into_response())
}

/// Answers `/v1/audio/transcriptions` and `/v1/audio/translations`.
pub(super) async fn transcriptions(call: Call) -> Result<Response, Refused> {
    call.faulted().await?;
    let asked = parse(&call.headers, call.bytes.clone()).await.map_err(|failure| call.refused(&failure))?;
    if !asked.model.is_empty() && asked.model != call.engine.config.model {
        let failure = Failure::not_found(format!("The model `{}` does not exist.", asked.model));
        return Err(call.refused(&failure));
    }
    let Some(size) = asked.file else {
        return Err(call.refused(&Failure::shape("1 validation error:\n  file: Field required")));
    };
    let text = format!("{size} bytes of audio");
    if asked.stream {
        let chunk = |delta: serde_json::Value, finish: Option<&str>| {
            let choice = json!({ "delta": delta, "finish_reason": finish });
            let chunk = json!({
                "id": "trsc-1", "object": "transcription.chunk", "created": 0, "model": asked.model,
                "choices": [choice],
            });
            Ok::<_, Infallible>(Bytes::from(format!("data: {chunk}\n\n")))
        };
        let mut events: Vec<_> =
            text.split_inclusive(' ').map(|word| chunk(json!({ "content": word }), None)).collect();
        events.push(chunk(json!({ "content": "" }), Some("stop")));
        events.push(Ok(Bytes::from_static(b"data: [DONE]\n\n")));
        let body = Body::from_stream(stream::iter(events));
        return Ok(([(header::CONTENT_TYPE, EVENT_STREAM)], body).into_response());
    }
    if asked.format == "text" {
        return Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response());
    }
    let body = json!({ "text": text, "usage": { "type": "duration", "seconds": 1 } });
    Ok(answer(StatusCode::OK, body.to_string()))
}

async fn parse(headers: &HeaderMap, bytes: Bytes) -> Result<Asked, Failure> {
    let invalid = |error: multer::Error| Failure::shape(format!("1 validation error:\n  {error}"));
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let boundary = multer::parse_boundary(content_type).map_err(invalid)?;
    let mut form = Multipart::new(stream::iter([Ok::<_, Infallible>(bytes)]), boundary);
    let mut asked = Asked::default();
    while let Some(field) = form.next_field().await.map_err(invalid)? {
        match field.name().unwrap_or_default() {
            "model" => asked.model = field.text().await.map_err(invalid)?,
            "response_format" => asked.format = field.text().await.map_err(invalid)?,
            "stream" => asked.stream = field.text().await.map_err(invalid)? == "true",
            "file" => asked.file = Some(field.bytes().await.map_err(invalid)?.len()),
            _ => {}
        }
    }
    Ok(asked)
}
