//! The Helm chart: the same objects with placeholders instead of values.

use serde_json::json;
use tortie_api::to_yaml;

use crate::controllers::deployment;
use crate::node;
use crate::template::Template;
use crate::{
    DEFINITIONS, KEPT_DEFINITIONS, NODE_RESTRICTION, RBAC, Values, documents, is_role_of_agents, parsed,
    reading,
};

/// The paths in the chart's folder, and contents.
pub(crate) fn files() -> Vec<(String, String)> {
    let mut files = vec![
        ("Chart.yaml".to_owned(), chart()),
        ("values.yaml".to_owned(), values()),
        ("templates/rbac.yaml".to_owned(), rbac()),
        ("templates/node-restriction.yaml".to_owned(), where_known(NODE_RESTRICTION)),
        ("templates/definitions.yaml".to_owned(), where_known(KEPT_DEFINITIONS)),
        ("templates/node.yaml".to_owned(), node_template()),
    ];
    // Helm creates what is in this folder before anything else, and never changes or deletes it.
    files.extend(DEFINITIONS.iter().map(|(name, text)| (format!("crds/{name}"), (*text).to_owned())));
    files
}

fn chart() -> String {
    to_yaml(&json!({
        "apiVersion": "v2", "name": "tortie", "type": "application",
        "description": "Networking and network policy for Kubernetes clusters of Linux and Windows nodes",
        "version": env!("CARGO_PKG_VERSION"), "appVersion": env!("CARGO_PKG_VERSION"),
    }))
}

fn values() -> String {
    let values = Values::default();
    let text = to_yaml(&json!({
        "image": values.image,
        "imagePullPolicy": values.pull_policy,
        "cniBinDir": values.cni_bin_dir,
        "cniConfDir": values.cni_conf_dir,
        "bgpSecrets": values.bgp_secrets,
        "policyOnly": values.policy_only,
        "config": values.environment(),
    }));
    format!(
        "# config has the environment variables of the agents: see docs/reference.md. bgpSecrets has the names of the Secrets with\n# passwords of BGP peers, in the namespace of the release. With policyOnly, another CNI plugin connects the pods, and agents only\n# enforce policy; cniBinDir, cniConfDir and TORTIE_DEFAULT_POOL… then have no meaning.\n{text}"
    )
}

/// Helm creates the namespace (`--create-namespace`), and refuses one of the chart that exists.
fn rbac() -> String {
    let mut documents =
        RBAC.split("---\n").filter(|document| !document.contains("kind: Namespace\n")).peekable();
    let mut text = String::new();
    while let Some(document) = documents.next() {
        match parsed(document).first().filter(|object| is_role_of_agents(object)) {
            Some(role) => text.push_str(&format!(
                "{{{{- if .Values.policyOnly }}}}\n{}{{{{- else }}}}\n{document}{{{{- end }}}}\n",
                to_yaml(&reading(role))
            )),
            None => text.push_str(document),
        }
        if documents.peek().is_some() {
            text.push_str("---\n");
        }
    }
    text
}

/// Older API servers do not have the kind. Unlike kinds, helm knows the version also without a cluster.
fn where_known(policies: &str) -> String {
    let has_kind = "semverCompare \">=1.30-0\" .Capabilities.KubeVersion.Version";
    format!("{{{{- if {has_kind} }}}}\n{policies}{{{{- end }}}}\n")
}

fn node_template() -> String {
    let placeholder = |name: &str| format!("{{{{ .Values.{name} }}}}");
    let template = Template {
        image: placeholder("image"),
        pull_policy: placeholder("imagePullPolicy"),
        cni_bin_dir: placeholder("cniBinDir"),
        cni_conf_dir: placeholder("cniConfDir"),
        config_digest: "{{ .Values.config | toJson | sha256sum }}".to_owned(),
    };
    // Who only enforces policy creates no pool, and may not.
    let setup = documents(&[node::setup_role(), node::setup_binding()]);
    let setup = format!("{{{{- if not .Values.policyOnly }}}}\n{setup}---\n{{{{- end }}}}\n");
    let objects = [node::config_map(json!("CONFIG")), deployment(&template)];
    let secrets = documents(&node::secrets_role(json!("SECRETS")));
    let secrets = secrets.replace("SECRETS\n", "{{ compact .Values.bgpSecrets | toJson }}\n");
    let optional = format!("{{{{- if compact .Values.bgpSecrets }}}}\n---\n{secrets}{{{{- end }}}}\n");
    let config = "\n  {{- if .Values.policyOnly }}\n  TORTIE_POLICY_ONLY: \"true\"\n  {{- end }}\n  {{- range $name, $value := .Values.config }}\n  \
                  {{- if not (and $.Values.policyOnly (hasPrefix \"TORTIE_DEFAULT_POOL\" $name)) }}\n  {{ $name }}: {{ $value | toString | quote }}\n  \
                  {{- end }}\n  {{- end }}\n";
    let agents =
        [node::policy_only_daemon_set(&template), node::daemon_set(&template)].map(|set| documents(&[set]));
    let agents = format!(
        "---\n{{{{- if .Values.policyOnly }}}}\n{}{{{{- else }}}}\n{}{{{{- end }}}}\n",
        agents[0], agents[1]
    );
    setup + &documents(&objects).replace(" CONFIG\n", config) + &agents + &optional
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_have_every_value_and_the_namespace_is_left_to_helm() {
        let values = tortie_api::from_yaml(&values()).unwrap();
        let template = node_template();
        for name in values[0].as_object().unwrap().keys() {
            assert!(template.contains(&format!(".Values.{name} ")), "{name} has no effect");
        }
        assert!(!template.contains("CONFIG"));
    }

    #[test]
    fn the_template_of_roles_has_those_of_both_modes_and_no_namespace() {
        let template = rbac();
        let (before, rest) = template.split_once("{{- if .Values.policyOnly }}\n").unwrap();
        let (of_policy_only, rest) = rest.split_once("{{- else }}\n").unwrap();
        let (of_others, after) = rest.split_once("{{- end }}\n").unwrap();
        for (policy_only, role) in [(true, of_policy_only), (false, of_others)] {
            let mut expected = crate::permissions(policy_only);
            expected.retain(|object| object["kind"] != "Namespace");
            assert_eq!(tortie_api::from_yaml(&format!("{before}{role}{after}")).unwrap(), expected);
        }
    }
}
