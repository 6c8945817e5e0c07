//! The operators' page: files in the binary, and headers that let the browser run nothing else.
//!
//! It knows no state of the daemon. The page fetches its data as any client would, from `/events`,
//! `/decisions`, `/workers/{id}` and `/policies/…`.

use axum::{
    Router,
    http::{HeaderName, header},
    response::IntoResponse,
    routing::get,
};

use crate::state::SharedState;

/// Path, media type, content.
type File = (&'static str, &'static str, &'static str);

/// A module of the page's script.
macro_rules! script {
    ($name:literal) => {
        (concat!("/page/", $name), "text/javascript; charset=utf-8", include_str!(concat!("page/", $name)))
    };
}

const FILES: [File; 19] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page/page.css")),
    ("/page.svg", "image/svg+xml", include_str!("page/page.svg")),
    script!("api.js"),
    script!("charts.js"),
    script!("dialogs.js"),
    script!("dom.js"),
    script!("fleet.js"),
    script!("format.js"),
    script!("lanes.js"),
    script!("main.js"),
    script!("overview.js"),
    script!("receipt.js"),
    script!("request.js"),
    script!("requests.js"),
    script!("slot.js"),
    script!("store.js"),
    script!("tips.js"),
    script!("worker.js"),
];

/// Only own files, nothing inline, no text turned into markup, no framing.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                   base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                   trusted-types 'none'";

const HEADERS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, CSP),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    // Another version of the daemon has another page.
    (header::CACHE_CONTROL, "no-store"),
];

/// The files of the page.
pub(super) fn routes() -> Router<SharedState> {
    FILES.into_iter().fold(Router::new(), |routes, (path, kind, content)| {
        let file = move || async move { ([(header::CONTENT_TYPE, kind)], HEADERS, content).into_response() };
        routes.route(path, get(file))
    })
}

/// Returns whether a path is one of the page's files, which need no token.
pub(super) fn is_of(path: &str) -> bool {
    FILES.iter().any(|(file, _, _)| *file == path)
}
