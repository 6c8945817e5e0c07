//! `[ext_proc]`: the endpoint picker for Envoy.

use std::net::SocketAddr;

use pointsman_config_file::{Report, section};

use super::{Tls, server::taken};

/// Upper limit of the configured number of requests: each holds its body and its state.
const MAX_STREAMS: usize = 1_000_000;

/// Endpoint picker for Envoy, which carries the requests; see envoy.md.
#[section(restart, rules)]
pub struct ExtProc {
    /// Address that Envoy's ext_proc filter calls; default: none.
    #[key(example = "\"127.0.0.1:9002\"")]
    pub listen: Option<SocketAddr>,
    /// Requests that Envoy may ask about at the same time.
    #[key(default = 10_000, range = 1..=MAX_STREAMS, reason = "is out of range")]
    pub max_streams: usize,
    /// TLS for Envoy, with the keys of [server.tls]; no table: plain HTTP/2. With client_ca_file and
    /// require_client_cert, only Envoys with its certificates may ask.
    #[key(
        example = "{ cert_file = \"/etc/pointsman/picker.crt\", key_file = \"/etc/pointsman/picker.key\" }",
        nested
    )]
    pub tls: Option<Tls>,
}

impl ExtProc {
    fn rules(&self, report: &mut Report<'_>) {
        if self.listen.is_some() && cfg!(not(feature = "ext-proc")) {
            let message =
                "this binary was built without the endpoint picker: build it with the feature `ext-proc`";
            report.add("listen", message);
        }
    }

    /// Refuses the addresses of other listeners, which come with their keys.
    pub(super) fn check_listen(&self, others: [(&str, SocketAddr); 2], report: &mut Report<'_>) {
        let Some(listen) = self.listen else { return };
        for message in others.into_iter().filter_map(|other| taken(listen, other)) {
            report.add("listen", message);
        }
    }
}

#[cfg(test)]
mod tests {
    use pointsman_config_file::Section as _;

    use super::*;

    #[test]
    fn values_that_cannot_serve_are_named() {
        let taken: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        let mut wrong = ExtProc { listen: Some(taken), max_streams: 0, tls: Some(Tls::default()) };
        let others = [("server.listen", taken), ("server.admin_listen", "127.0.0.1:9090".parse().unwrap())];
        let mut problems = Vec::new();
        let mut report = Report::new(&mut problems);
        wrong.check_listen(others, &mut report.at("ext_proc"));
        wrong.check(&mut report.at("ext_proc"));
        let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
        let expected =
            ["ext_proc.listen", "ext_proc.max_streams", "ext_proc.tls.cert_file", "ext_proc.tls.key_file"];
        assert_eq!(paths, expected);
        let mut problems = Vec::new();
        ExtProc::default().check(&mut Report::new(&mut problems));
        assert!(problems.is_empty());
    }
}
