//! `/v1/realtime`: a WebSocket. The server sends a greeting, echoes messages, and transcribes committed
//! audio.

use std::sync::Arc;

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use futures_util::{SinkExt as _, StreamExt as _};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};

use super::call::{Call, Refused};
use crate::{engine::Engine, failure::Failure, server::Conn};

pub(super) async fn realtime(
    State(engine): State<Arc<Engine>>,
    Extension(conn): Extension<Conn>,
    mut request: Request,
) -> Result<Response, Refused> {
    let path = request.uri().path_and_query().map_or("", |path| path.as_str()).to_owned();
    let call = Call { engine, conn, path, headers: request.headers().clone(), bytes: Bytes::new() };
    call.faulted().await?;
    let query = request.uri().query().unwrap_or_default();
    let model = query.split('&').find_map(|pair| pair.strip_prefix("model="));
    if model.is_some_and(|model| model != call.engine.config.model) {
        return Err(call.refused(&Failure::not_found("The model does not exist.")));
    }
    let Some(key) = call.headers.get(header::SEC_WEBSOCKET_KEY) else {
        return Err(call.refused(&Failure::shape("a WebSocket needs an upgrade")));
    };
    let accept = HeaderValue::try_from(derive_accept_key(key.as_bytes()));
    let upgrade = hyper::upgrade::on(&mut request);
    let Call { engine, conn, .. } = call;
    conn.spawn(async move {
        if let Ok(upgraded) = upgrade.await {
            let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
            serve_session(socket, &engine).await;
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept.unwrap_or(HeaderValue::from_static("")));
    Ok(response)
}

async fn serve_session(mut socket: WebSocketStream<impl AsyncRead + AsyncWrite + Unpin>, engine: &Engine) {
    let hello = json!({ "type": "session.created", "id": format!("sess-{}", engine.id), "created": 0 });
    if socket.send(Message::text(hello.to_string())).await.is_err() {
        return;
    }
    while let Some(Ok(message)) = socket.next().await {
        let answers = match message {
            Message::Text(text) => answers(text.as_str()),
            Message::Binary(bytes) => vec![Message::Binary(bytes)],
            Message::Close(_) => return,
            _ => Vec::new(),
        };
        for answer in answers {
            if socket.send(answer).await.is_err() {
                return;
            }
        }
    }
}

fn answers(text: &str) -> Vec<Message> {
    let asked: Value = serde_json::from_str(text).unwrap_or_default();
    if asked.get("type").and_then(Value::as_str) != Some("input_audio_buffer.commit") {
        return vec![Message::text(text)];
    }
    let usage = json!({ "prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6 });
    let all = [
        json!({ "type": "transcription.delta", "delta": "some " }),
        json!({ "type": "transcription.delta", "delta": "words" }),
        json!({ "type": "transcription.done", "text": "some words", "usage": usage }),
    ];
    all.iter().map(|event| Message::text(event.to_string())).collect()
}
