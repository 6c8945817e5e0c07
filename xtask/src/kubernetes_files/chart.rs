//! The Helm chart: `helm lint`, and what it renders for values that choose each of its parts.

use std::{path::Path, process::Command};

use anyhow::bail;

use crate::{sh, table::Checks};

const CHART: &str = "deploy/helm/pointsman";
/// Name of a set of values, and the values.
const VALUES: [(&str, &[&str]); 6] = [
    ("chart", &[]),
    (
        "chart-complete",
        &["monitoring.enabled=true", "autoscaling.enabled=true", "networkPolicy.enabled=true"],
    ),
    (
        "chart-envoy",
        &["monitoring.enabled=true", "endpointPicker.enabled=true", "networkPolicy.enabled=true"],
    ),
    (
        "chart-policies-image",
        &["policies.source=image", "policies.image.reference=registry.example/policies:1"],
    ),
    (
        "chart-policies-registry",
        &[
            "policies.source=registry",
            "policies.registry.artifacts[0].file=prefill.wasm",
            "policies.registry.artifacts[0].reference=registry.example/policies/prefill:1",
            "policies.registry.artifacts[1].file=decode-override.wasm",
            "policies.registry.artifacts[1].reference=registry.example/policies/decode-override:1",
        ],
    ),
    // What no overlay of the Kustomize files has.
    (
        "chart-other",
        &[
            "replicaCount=1",
            "image.digest=sha256:0000000000000000000000000000000000000000000000000000000000000000",
            "image.pullPolicy=Always",
            "imagePullSecrets[0].name=registry",
            "podAnnotations.a=b",
            "podLabels.a=b",
            "nodeSelector.a=b",
            "tolerations[0].operator=Exists",
            "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey=a",
            "priorityClassName=high",
            "service.type=LoadBalancer",
            "service.annotations.a=b",
            "podDisruptionBudget.maxUnavailable=25%",
            "engines.discovery.resource=endpoint-slices",
            "restartOnConfigChange=true",
            "policies.source=persistentVolumeClaim",
            "policies.persistentVolumeClaim.claimName=policies",
            "monitoring.enabled=true",
            "monitoring.labels.release=prometheus",
            "monitoring.serviceMonitor.enabled=false",
            "monitoring.podMonitor.enabled=true",
            "networkPolicy.enabled=true",
            "networkPolicy.clientsFrom[0].podSelector.matchLabels.a=b",
            "networkPolicy.extraEgress[0].ports[0].port=4222",
            "env[0].name=POINTSMAN__ROUTING__HASH_SALT",
            "env[0].valueFrom.secretKeyRef.name=salt",
            "env[0].valueFrom.secretKeyRef.key=salt",
            "extraVolumes[0].name=models",
            "extraVolumes[0].persistentVolumeClaim.claimName=models",
            "extraVolumeMounts[0].name=models",
            "extraVolumeMounts[0].mountPath=/models",
        ],
    ),
];

/// Lints the chart, and returns what it renders for each set of values.
pub(super) fn rendered(tools: &Path, checks: &mut Checks) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let helm = super::program(tools, "helm");
    let chart = sh::root().join(CHART);
    let lint = Command::new(&helm).args(["lint", "--strict", "--quiet"]).arg(&chart).output()?;
    let text = [lint.stdout, lint.stderr].concat();
    checks.check("chart: helm lint --strict", "", lint.status.success());
    if !lint.status.success() {
        sh::print(&String::from_utf8_lossy(&text));
    }
    let mut all = Vec::new();
    for (name, values) in VALUES {
        let mut command = Command::new(&helm);
        command.args(["template", "pointsman"]).arg(&chart).args(["--namespace", "serving"]);
        for resources in ["monitoring.coreos.com/v1", "inference.networking.k8s.io/v1"] {
            command.args(["--api-versions", resources]);
        }
        for value in values {
            command.args(["--set", value]);
        }
        let ran = command.output()?;
        if !ran.status.success() {
            bail!("helm cannot render {name}: {}", String::from_utf8_lossy(&ran.stderr));
        }
        all.push((name.to_owned(), ran.stdout));
    }
    Ok(all)
}
