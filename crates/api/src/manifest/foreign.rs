//! Kinds of other products, and what they could change: those that filter or redirect packets, those that bring pods or
//! any objects, and those that do neither although their name may sound like policy.
//!
//! A kind that is not here could change everything. The shape of a document may widen what the table says, and never
//! narrows it.

use serde_json::Value;

use super::CouldChange;

/// What the objects of a kind do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Nothing that a verdict depends on.
    Nothing,
    /// They check other objects, or hold parts of them as patterns.
    Checks,
    /// They bring pods to their own namespace, and Services and policies for them.
    Pods,
    /// They filter packets at pods of their own namespace.
    Policy,
    /// They bring any objects, change objects of others, or filter packets anywhere.
    Everything,
}

use Effect::{Checks, Everything, Nothing, Pods, Policy};

/// A group, its kinds (all others if there are none), and what they do. The first row that fits counts. A group `*.x` is
/// each group that ends with `.x`.
type Row = (&'static str, &'static [&'static str], Effect);

const TABLE: &[Row] = &[
    // Kubernetes.
    ("rbac.authorization.k8s.io", &[], Nothing),
    ("storage.k8s.io", &[], Nothing),
    ("snapshot.storage.k8s.io", &[], Nothing),
    ("scheduling.k8s.io", &[], Nothing),
    ("coordination.k8s.io", &[], Nothing),
    ("certificates.k8s.io", &[], Nothing),
    ("authentication.k8s.io", &[], Nothing),
    ("authorization.k8s.io", &[], Nothing),
    ("node.k8s.io", &[], Nothing),
    ("events.k8s.io", &[], Nothing),
    ("flowcontrol.apiserver.k8s.io", &[], Nothing),
    ("resource.k8s.io", &[], Nothing),
    ("metrics.k8s.io", &[], Nothing),
    ("apiextensions.k8s.io", &[], Nothing),
    ("apiregistration.k8s.io", &[], Nothing),
    ("autoscaling", &[], Nothing),
    ("autoscaling.k8s.io", &[], Nothing),
    ("policy", &[], Nothing),
    ("audit.k8s.io", &[], Nothing),
    ("kubeadm.k8s.io", &[], Nothing),
    ("kubelet.config.k8s.io", &[], Nothing),
    ("kubescheduler.config.k8s.io", &[], Nothing),
    ("apiserver.config.k8s.io", &[], Nothing),
    ("kind.x-k8s.io", &[], Nothing),
    (
        "admissionregistration.k8s.io",
        &["ValidatingWebhookConfiguration", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"],
        Checks,
    ),
    (
        "gateway.networking.k8s.io",
        &[
            "GatewayClass",
            "HTTPRoute",
            "GRPCRoute",
            "TCPRoute",
            "TLSRoute",
            "UDPRoute",
            "ReferenceGrant",
            "BackendTLSPolicy",
            "BackendLBPolicy",
        ],
        Nothing,
    ),
    ("gateway.networking.k8s.io", &["Gateway"], Pods),
    // They filter packets.
    ("cilium.io", &["CiliumNetworkPolicy"], Policy),
    (
        "cilium.io",
        &[
            "CiliumBGPAdvertisement",
            "CiliumBGPClusterConfig",
            "CiliumBGPNodeConfig",
            "CiliumBGPPeerConfig",
            "CiliumBGPPeeringPolicy",
            "CiliumL2AnnouncementPolicy",
            "CiliumLoadBalancerIPPool",
            "CiliumNode",
            "CiliumPodIPPool",
        ],
        Nothing,
    ),
    ("crd.antrea.io", &["NetworkPolicy"], Policy),
    ("crd.antrea.io", &["Traceflow", "ExternalIPPool"], Nothing),
    ("k8s.ovn.org", &["EgressFirewall"], Policy),
    ("k8s.ovn.org", &["EgressQoS"], Nothing),
    ("network.openshift.io", &["EgressNetworkPolicy"], Policy),
    ("k8s.cni.cncf.io", &["MultiNetworkPolicy"], Policy),
    ("k8s.cni.cncf.io", &["NetworkAttachmentDefinition"], Nothing),
    (
        "policy.linkerd.io",
        &[
            "AuthorizationPolicy",
            "MeshTLSAuthentication",
            "NetworkAuthentication",
            "Server",
            "ServerAuthorization",
        ],
        Policy,
    ),
    ("policy.linkerd.io", &["HTTPRoute"], Nothing),
    ("vpcresources.k8s.aws", &["SecurityGroupPolicy"], Policy),
    ("networking.k8s.aws", &["PolicyEndpoint", "ApplicationNetworkPolicy"], Policy),
    ("elbv2.k8s.aws", &["IngressClassParams"], Nothing),
    ("networking.gke.io", &["FQDNNetworkPolicy"], Policy),
    ("networking.gke.io", &["ManagedCertificate", "FrontendConfig", "ServiceAttachment"], Nothing),
    ("cloud.google.com", &["BackendConfig"], Nothing),
    ("appgw.ingress.k8s.io", &["AzureIngressProhibitedTarget"], Nothing),
    ("aadpodidentity.k8s.io", &[], Nothing),
    // Mesh: the namespace of its root policies is a setting, so one of Istio could be for all pods.
    ("security.istio.io", &[], Everything),
    ("telemetry.istio.io", &[], Nothing),
    // Calico Enterprise and Calico Cloud: kinds that filter nothing.
    (
        "projectcalico.org",
        &[
            "AlertException",
            "DeepPacketInspection",
            "GlobalAlert",
            "GlobalAlertTemplate",
            "GlobalReport",
            "GlobalReportType",
            "GlobalThreatFeed",
            "LicenseKey",
            "ManagedCluster",
            "PacketCapture",
            "PolicyRecommendationScope",
            "SecurityEventWebhook",
            "UISettings",
            "UISettingsGroup",
        ],
        Nothing,
    ),
    // They bring pods.
    (
        "argoproj.io",
        &["Rollout", "AnalysisRun", "CronWorkflow", "EventBus", "EventSource", "Experiment", "Workflow"],
        Pods,
    ),
    ("argoproj.io", &["AppProject", "AnalysisTemplate", "ClusterAnalysisTemplate"], Checks),
    ("monitoring.coreos.com", &["Alertmanager", "Prometheus", "PrometheusAgent", "ThanosRuler"], Pods),
    (
        "monitoring.coreos.com",
        &["AlertmanagerConfig", "PodMonitor", "Probe", "PrometheusRule", "ScrapeConfig", "ServiceMonitor"],
        Nothing,
    ),
    ("grafana.integreatly.org", &["Grafana"], Pods),
    (
        "grafana.integreatly.org",
        &["GrafanaDashboard", "GrafanaDatasource", "GrafanaFolder", "GrafanaAlertRuleGroup"],
        Nothing,
    ),
    ("loki.grafana.com", &["LokiStack"], Pods),
    ("loki.grafana.com", &["AlertingRule", "RecordingRule"], Nothing),
    ("opentelemetry.io", &["OpenTelemetryCollector"], Pods),
    ("jaegertracing.io", &["Jaeger"], Pods),
    (
        "kafka.strimzi.io",
        &["Kafka", "KafkaBridge", "KafkaConnect", "KafkaMirrorMaker2", "KafkaNodePool"],
        Pods,
    ),
    ("kafka.strimzi.io", &["KafkaConnector", "KafkaTopic", "KafkaUser"], Nothing),
    ("postgresql.cnpg.io", &["Cluster", "Pooler"], Pods),
    ("postgresql.cnpg.io", &["Backup", "Database", "ScheduledBackup"], Nothing),
    ("acid.zalan.do", &["postgresql"], Pods),
    ("rabbitmq.com", &["RabbitmqCluster"], Pods),
    ("rabbitmq.com", &["Binding", "Exchange", "Permission", "Policy", "Queue", "User", "Vhost"], Nothing),
    ("*.k8s.elastic.co", &[], Pods),
    ("ceph.rook.io", &["CephCluster", "CephFilesystem", "CephObjectStore"], Pods),
    ("ceph.rook.io", &["CephBlockPool", "CephFilesystemSubVolumeGroup", "CephObjectStoreUser"], Nothing),
    ("serving.knative.dev", &["Configuration", "Revision", "Service"], Pods),
    ("keda.sh", &["ScaledJob"], Pods),
    ("keda.sh", &["ClusterTriggerAuthentication", "ScaledObject", "TriggerAuthentication"], Nothing),
    ("tekton.dev", &["PipelineRun", "TaskRun"], Pods),
    ("tekton.dev", &["ClusterTask", "Pipeline", "Task"], Checks),
    ("operators.coreos.com", &["CatalogSource"], Pods),
    ("operators.coreos.com", &["OperatorGroup"], Nothing),
    ("build.openshift.io", &["Build", "BuildConfig"], Pods),
    ("apps.openshift.io", &["DeploymentConfig"], Pods),
    // They bring any objects.
    ("helm.toolkit.fluxcd.io", &[], Everything),
    ("kustomize.toolkit.fluxcd.io", &[], Everything),
    ("fluxcd.controlplane.io", &["FluxReport", "ResourceSetInputProvider"], Nothing),
    ("helm.cattle.io", &[], Everything),
    ("argoproj.io", &["Application", "ApplicationSet", "Sensor"], Everything),
    ("template.openshift.io", &[], Everything),
    // Those that make other objects are recognised before.
    ("kustomize.config.k8s.io", &[], Nothing),
    // They check objects. Those that also generate or change some are recognised by their shape.
    ("kyverno.io", &["ClusterPolicy", "Policy", "PolicyException"], Checks),
    ("policies.kyverno.io", &["ImageValidatingPolicy", "PolicyException", "ValidatingPolicy"], Checks),
    ("wgpolicyk8s.io", &[], Nothing),
    ("templates.gatekeeper.sh", &[], Checks),
    ("constraints.gatekeeper.sh", &[], Checks),
    ("config.gatekeeper.sh", &[], Nothing),
    ("status.gatekeeper.sh", &[], Nothing),
    // They neither filter packets nor bring pods.
    (
        "gateway.envoyproxy.io",
        &[
            "Backend",
            "BackendTrafficPolicy",
            "ClientTrafficPolicy",
            "EnvoyExtensionPolicy",
            "EnvoyPatchPolicy",
            "HTTPRouteFilter",
            "SecurityPolicy",
        ],
        Nothing,
    ),
    ("image.toolkit.fluxcd.io", &[], Nothing),
    ("source.toolkit.fluxcd.io", &[], Nothing),
    ("notification.toolkit.fluxcd.io", &[], Nothing),
    ("cert-manager.io", &[], Nothing),
    ("trust.cert-manager.io", &[], Nothing),
    ("external-secrets.io", &[], Nothing),
    ("generators.external-secrets.io", &[], Nothing),
    ("bitnami.com", &["SealedSecret"], Nothing),
    ("secrets-store.csi.x-k8s.io", &[], Nothing),
    ("metallb.io", &[], Nothing),
    ("traefik.io", &[], Nothing),
    ("traefik.containo.us", &[], Nothing),
    ("externaldns.k8s.io", &[], Nothing),
    ("sriovnetwork.openshift.io", &[], Nothing),
    ("nmstate.io", &[], Nothing),
    ("nvidia.com", &["ClusterPolicy", "NVIDIADriver"], Nothing),
    ("velero.io", &["Backup", "BackupStorageLocation", "Schedule", "VolumeSnapshotLocation"], Nothing),
    ("config.kio.kasten.io", &["Policy", "PolicyPreset", "Profile"], Nothing),
    ("longhorn.io", &["BackupTarget", "RecurringJob", "Setting"], Nothing),
    (
        "config.openshift.io",
        &["APIServer", "ClusterVersion", "OAuth", "Image", "Scheduler", "Proxy"],
        Nothing,
    ),
    ("machineconfiguration.openshift.io", &[], Nothing),
    ("machine.openshift.io", &[], Nothing),
    ("image.openshift.io", &[], Nothing),
    ("route.openshift.io", &[], Nothing),
    ("security.openshift.io", &[], Nothing),
    ("quota.openshift.io", &[], Nothing),
    ("console.openshift.io", &[], Nothing),
    ("user.openshift.io", &[], Nothing),
    ("authorization.openshift.io", &[], Nothing),
];

/// Fields by which a check becomes something that writes objects.
const WRITING: [&str; 3] = ["generate", "mutate", "mutateExisting"];

/// What an object of a kind that Tortie does not keep could change; `None` if the table does not have the kind.
pub(super) fn could_change(
    api_version: &str,
    kind: &str,
    namespace: &str,
    value: &Value,
) -> Option<CouldChange> {
    let effect = effect(group_of(api_version), kind)?;
    let namespace = || namespace.to_owned();
    let of_table = match effect {
        Nothing | Checks => CouldChange::Nothing,
        Pods => CouldChange::Ends { namespace: namespace(), addresses: Vec::new() },
        Policy => CouldChange::AtPods { namespace: namespace() },
        Everything => CouldChange::Everything,
    };
    Some(of_table.max(of_shape(effect, namespace(), value)))
}

/// Whether no object of this kind could change a verdict, as far as the kind alone says.
pub(super) fn is_harmless(group: &str, kind: &str) -> bool {
    matches!(effect(group, kind), Some(Nothing | Checks))
}

/// The group of an `apiVersion`.
pub(super) fn group_of(api_version: &str) -> &str {
    api_version.split_once('/').map_or("", |(group, _)| group)
}

fn effect(group: &str, kind: &str) -> Option<Effect> {
    let is_of = |of: &str| match of.strip_prefix('*') {
        Some(end) => group.ends_with(end),
        None => of == group,
    };
    let fits = |(of, kinds, _): &&Row| is_of(of) && (kinds.is_empty() || kinds.contains(&kind));
    TABLE.iter().find(fits).map(|(.., effect)| *effect)
}

/// What the content of a document could change, whatever its kind is.
fn of_shape(effect: Effect, namespace: String, value: &Value) -> CouldChange {
    let fields = || value.as_object().into_iter().flatten().filter(|(name, _)| *name != "metadata");
    let any = |is: &dyn Fn(&Value) -> bool| fields().any(|(_, field)| within(field, is));
    let writes = |value: &Value| WRITING.iter().any(|field| !value[*field].is_null());
    // Alerts of threat feeds may fill a set of networks.
    let fills_set = |value: &Value| value["globalNetworkSet"].is_object();
    let is_pod = |value: &Value| {
        value["containers"].as_array().is_some_and(|all| all.iter().any(|one| one["image"].is_string()))
    };
    match effect {
        Checks if any(&writes) => CouldChange::Everything,
        Checks => CouldChange::Nothing,
        _ if any(&is_object) || any(&fills_set) => CouldChange::Everything,
        _ if any(&is_pod) => CouldChange::Ends { namespace, addresses: Vec::new() },
        _ => CouldChange::Nothing,
    }
}

/// Whether this is a whole object, and no reference to one.
fn is_object(value: &Value) -> bool {
    let has = |field: &str| value.get(field).is_some_and(Value::is_object);
    value["apiVersion"].is_string() && value["kind"].is_string() && (has("metadata") || has("spec"))
}

fn within(value: &Value, is: &dyn Fn(&Value) -> bool) -> bool {
    match value {
        Value::Object(fields) => is(value) || fields.values().any(|field| within(field, is)),
        Value::Array(items) => items.iter().any(|item| within(item, is)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(api_version: &str, kind: &str, content: Value) -> Option<CouldChange> {
        let mut value = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "x"}});
        value.as_object_mut().unwrap().extend(content.as_object().cloned().unwrap_or_default());
        could_change(api_version, kind, "shop", &value)
    }

    #[test]
    fn kinds_of_others_change_what_the_table_says() {
        let at = || Some(CouldChange::AtPods { namespace: "shop".to_owned() });
        let pods = || Some(CouldChange::Ends { namespace: "shop".to_owned(), addresses: Vec::new() });
        let (all, nothing) = (|| Some(CouldChange::Everything), || Some(CouldChange::Nothing));
        for (api_version, kind, expected) in [
            // They filter packets.
            ("cilium.io/v2", "CiliumNetworkPolicy", at()),
            ("cilium.io/v2", "CiliumClusterwideNetworkPolicy", None),
            ("crd.antrea.io/v1beta1", "NetworkPolicy", at()),
            ("crd.antrea.io/v1beta1", "ClusterNetworkPolicy", None),
            ("k8s.ovn.org/v1", "EgressFirewall", at()),
            ("k8s.cni.cncf.io/v1beta1", "MultiNetworkPolicy", at()),
            ("security.istio.io/v1", "AuthorizationPolicy", all()),
            ("vpcresources.k8s.aws/v1beta1", "SecurityGroupPolicy", at()),
            ("networking.k8s.aws/v1alpha1", "ClusterNetworkPolicy", None),
            ("network.azure.com/v1api20201101", "NetworkSecurityGroup", None),
            ("projectcalico.org/v3", "EgressGatewayPolicy", None),
            // They bring pods, or any objects.
            ("helm.toolkit.fluxcd.io/v2", "HelmRelease", all()),
            ("argoproj.io/v1alpha1", "Application", all()),
            ("argoproj.io/v1alpha1", "Rollout", pods()),
            ("monitoring.coreos.com/v1", "Prometheus", pods()),
            ("elasticsearch.k8s.elastic.co/v1", "Elasticsearch", pods()),
            ("template.openshift.io/v1", "Template", all()),
            ("fluxcd.controlplane.io/v1", "ResourceSet", None),
            ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", None),
            // They do neither, although some sound like policy.
            ("gateway.envoyproxy.io/v1alpha1", "ClientTrafficPolicy", nothing()),
            ("image.toolkit.fluxcd.io/v1", "ImagePolicy", nothing()),
            ("audit.k8s.io/v1", "Policy", nothing()),
            ("sriovnetwork.openshift.io/v1", "SriovNetworkNodePolicy", nothing()),
            ("nmstate.io/v1", "NodeNetworkConfigurationPolicy", nothing()),
            ("nvidia.com/v1", "ClusterPolicy", nothing()),
            ("velero.io/v1", "Schedule", nothing()),
            ("velero.io/v1", "Restore", None),
            ("config.kio.kasten.io/v1alpha1", "Policy", nothing()),
            ("projectcalico.org/v3", "GlobalAlert", nothing()),
            ("kyverno.io/v1", "ClusterPolicy", nothing()),
            ("rbac.authorization.k8s.io/v1", "Role", nothing()),
            // Not in the table.
            ("example.org/v1", "Thing", None),
            ("v1", "Thing", None),
        ] {
            assert_eq!(found(api_version, kind, json!({})), expected, "{api_version} {kind}");
        }
    }

    #[test]
    fn the_shape_widens_and_never_narrows() {
        let object =
            json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "x"}});
        let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "x"});
        let pod = json!({"spec": {"template": [{"containers": [{"name": "c", "image": "x"}]}]}});
        let pods = CouldChange::Ends { namespace: "shop".to_owned(), addresses: Vec::new() };
        let (all, nothing) = (CouldChange::Everything, CouldChange::Nothing);
        let generate = json!({"spec": {"rules": [{"generate": {"kind": "NetworkPolicy"}}]}});
        for (api_version, kind, content, expected) in [
            ("metallb.io/v1beta1", "IPAddressPool", json!({"spec": {"list": [object.clone()]}}), &all),
            ("metallb.io/v1beta1", "IPAddressPool", json!({"spec": {"ref": reference}}), &nothing),
            ("metallb.io/v1beta1", "IPAddressPool", pod.clone(), &pods),
            ("cilium.io/v2", "CiliumNetworkPolicy", pod.clone(), &pods),
            ("helm.toolkit.fluxcd.io/v2", "HelmRelease", json!({}), &all),
            ("kyverno.io/v1", "ClusterPolicy", generate, &all),
            (
                "kyverno.io/v1",
                "ClusterPolicy",
                json!({"spec": {"rules": [{"validate": {"pattern": pod}}]}}),
                &nothing,
            ),
            ("projectcalico.org/v3", "GlobalThreatFeed", json!({"spec": {"globalNetworkSet": {}}}), &all),
        ] {
            assert_eq!(
                found(api_version, kind, content.clone()).as_ref(),
                Some(expected),
                "{kind} {content}"
            );
        }
    }

    #[test]
    fn no_row_hides_another() {
        for (index, (group, kinds, _)) in TABLE.iter().enumerate() {
            for (earlier, of_earlier, _) in &TABLE[..index] {
                let overlaps = of_earlier.is_empty() || kinds.iter().any(|kind| of_earlier.contains(kind));
                assert!(earlier != group || !overlaps, "{group} {kinds:?}");
            }
        }
    }
}
