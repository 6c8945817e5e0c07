//! The double of the Kubernetes API server.

use pointsman_test_api_server::ApiServer;
use serde_json::json;

use super::Server;

/// A running double.
pub(super) struct Double {
    api: ApiServer,
}

impl Double {
    pub(super) async fn start() -> anyhow::Result<Self> {
        Ok(Self { api: ApiServer::start().await? })
    }
}

impl Server for Double {
    async fn put(&mut self, id: u64, address: &str) -> anyhow::Result<()> {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        self.api.put(
            "pods",
            json!({
                "metadata": { "name": format!("pod-{id}"), "annotations": { "pointsman.dev/port": port } },
                "status": { "podIP": host, "conditions": [{ "type": "Ready", "status": "True" }] },
            }),
        );
        Ok(())
    }

    async fn delete(&mut self, id: u64) -> anyhow::Result<()> {
        self.api.delete("pods", &format!("pod-{id}"));
        Ok(())
    }

    async fn fail(&mut self) -> anyhow::Result<()> {
        self.api.fail_with(Some(503));
        self.api.disconnect();
        Ok(())
    }

    async fn recover(&mut self) -> anyhow::Result<()> {
        self.api.compact();
        self.api.fail_with(None);
        Ok(())
    }

    fn config(&self) -> String {
        format!(
            "[[discovery.kubernetes]]\nname = \"a\"\napi = \"{}\"\nselector = \"app=vllm\"\ntoken_file = \"\"\n\
             ca_file = \"\"\nwatch = \"10s\"\ndefaults = {{ engine = \"vllm\", role = \"aggregated\" }}\n",
            self.api.url()
        )
    }

    fn source(&self) -> &'static str {
        "kubernetes:a"
    }
}
