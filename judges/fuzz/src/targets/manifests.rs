//! Files of objects, in YAML and in JSON.

use tortie_api::manifest::{self, Offline, PolicyForm};
use tortie_api::{Kind, to_yaml};
use tortie_policy::compile;

use crate::input::same;

/// A manifest. What is accepted can be written, and is then read as before. A policy can be compiled.
pub fn manifest(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let objects = match manifest::read("f", text) {
        Ok(objects) => objects,
        Err(problems) => {
            assert!(!problems.is_empty());
            problems.iter().for_each(|problem| assert!(!problem.to_string().is_empty()));
            return;
        }
    };
    for object in objects {
        // Its value is in the form in which it is stored, which is no manifest.
        if object.key.kind == Kind::IpamConfig {
            continue;
        }
        let written = to_yaml(&object.value);
        let again =
            manifest::read("f", &written).unwrap_or_else(|problems| panic!("{problems:?}\n{written}"));
        assert_eq!(again.len(), 1, "{written}");
        assert_eq!(again[0].key, object.key, "{written}");
        assert!(same(&again[0].value, &object.value), "{written}");
        if let Some(compiled) = compile(&object.key, &object.value) {
            assert_eq!(compiled.not_understood, None, "{written}");
        }
    }
}

/// A manifest, as `tortie convert` and the commands without a cluster read it. What a conversion writes is accepted.
pub fn manifest_conversion(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for form in [PolicyForm::Calico, PolicyForm::Kubernetes] {
        let Ok(converted) = manifest::convert("f", text, form) else { continue };
        for object in converted.objects {
            let written = to_yaml(&object);
            let read = manifest::read_kept("f", &written, None);
            assert!(read.is_ok(), "{read:?}\n{written}");
        }
    }
    for mut offline in [Offline::default(), Offline::strict()] {
        if offline.read("f", text).is_ok() {
            let _ = offline.settled();
        }
    }
}
