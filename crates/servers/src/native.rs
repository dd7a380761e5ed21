//! The definitions of Calico's kinds in the group `projectcalico.org/v3`, where Calico 3.32 can keep them. They are those of
//! `deploy/crds` except for the group and what Calico defines differently there.

use serde_json::{Value, json};

use crate::error::write;
use crate::{Error, KubeApi, programs};

const CRD: &str = "crd.projectcalico.org";
const NATIVE: &str = "projectcalico.org";

impl KubeApi {
    /// Creates the definitions of Calico's kinds in `projectcalico.org/v3` and the others of `deploy/crds`, and waits until
    /// the API server serves them.
    ///
    /// # Errors
    ///
    /// The API server rejects a definition.
    pub fn create_native_definitions(&self) -> Result<(), Error> {
        let folder = programs::workspace().join("deploy/crds").display().to_string();
        let text = self.kubectl(&["create", "--dry-run=client", "-o", "json", "-f", &folder])?;
        let mut definitions = Vec::new();
        for document in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
            let mut document = document.unwrap_or_default();
            match document.get_mut("items").and_then(Value::as_array_mut) {
                Some(items) => definitions.append(items),
                None => definitions.push(document),
            }
        }
        definitions.iter_mut().for_each(translate);
        let list = json!({"apiVersion": "v1", "kind": "List", "items": definitions}).to_string();
        let file = self.folder().join("native.json");
        write(&file, &list)?;
        self.kubectl(&["create", "-f", &file.display().to_string()])?;
        self.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"])?;
        Ok(())
    }
}

/// The definition in the other group.
fn translate(definition: &mut Value) {
    if definition["spec"]["group"] != CRD {
        return;
    }
    let plural = match definition["spec"]["names"]["plural"].as_str().unwrap_or_default() {
        "ipamconfigs" => {
            definition["spec"]["names"] = json!({
                "kind": "IPAMConfiguration", "listKind": "IPAMConfigurationList", "plural": "ipamconfigurations",
                "singular": "ipamconfiguration",
            });
            "ipamconfigurations".to_owned()
        }
        plural => plural.to_owned(),
    };
    definition["metadata"] = json!({"name": format!("{plural}.{NATIVE}")});
    definition["spec"]["group"] = json!(NATIVE);
    let version = &mut definition["spec"]["versions"][0];
    version["name"] = json!("v3");
    let spec = &mut version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
    match plural.as_str() {
        "blockaffinities" => {
            spec["deleted"] = json!({"type": "boolean", "default": false});
            spec["state"] =
                json!({"type": "string", "enum": ["", "confirmed", "pending", "pendingDeletion"]});
        }
        "ipamblocks" => spec["affinity"]["pattern"] = json!(r"^(host|virtual):[a-zA-Z0-9\.\-_]+$"),
        _ => {}
    }
}
