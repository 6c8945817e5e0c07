//! The OpenAPI documents of both listeners, at `/openapi.json`. Tests compare them with the routes and with
//! real answers.

use axum::{http::header, response::IntoResponse};

/// The clients' API.
pub(crate) const CLIENTS: &str = include_str!("openapi/clients.json");
/// The operators' API.
pub(crate) const ADMIN: &str = include_str!("openapi/admin.json");

/// Answers with a document.
pub(crate) async fn document(text: &'static str) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::Router;
    use serde_json::Value;

    use super::*;

    /// The paths of a router, from its debug text: `axum` has no other list of them.
    fn routed<S>(routes: &Router<S>) -> BTreeSet<String> {
        let text = format!("{routes:?}");
        // Behind it are the paths of the fallback.
        let (text, _) = text.split_once("fallback_router").unwrap();
        let paths = text.split("RouteId(").filter_map(|part| part.split_once("): \"")?.1.split_once('"'));
        paths.map(|(path, _)| path.replace("{*", "{")).collect()
    }

    fn documented(document: &str) -> BTreeSet<String> {
        let document: Value = serde_json::from_str(document).unwrap();
        document["paths"].as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn every_route_is_in_the_documents_and_no_other() {
        let (mut clients, admin) = (routed(&crate::http::endpoints()), routed(&crate::admin::endpoints()));
        // Their routes say that there is nothing.
        clients.retain(|path| !crate::http::NOT_RESPONSES.contains(&path.as_str()));
        // Fails if the debug text changes: then nothing would be compared.
        assert!(clients.contains("/v1/models/{id}") && admin.contains("/workers/{id}/drain"), "{clients:?}");
        // O4.1
        assert_eq!(clients, documented(CLIENTS));
        // O4.1
        assert_eq!(admin, documented(ADMIN));
    }
}
