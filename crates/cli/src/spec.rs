//! A VM's description: from a file, from options, or from both.

use crate::args::CreateArgs;
use crate::failure::Failure;
use crate::quantity::size;
use godwit_api::vm::{DiskSpec, NicSpec, Placement, Store, VmSpec};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::io::Read;
use std::path::Path;

/// `VOLUME=SIZE[,rados=POOL][,shared=DIR][,device=PATH[,overwrite][,zeroed]][,from=FILE]`.
///
/// # Errors
/// What is wrong with the text.
pub fn disk(text: &str) -> Result<DiskSpec, String> {
    let (head, mut rest) = text.split_once(',').map_or((text, None), |(head, rest)| (head, Some(rest)));
    let (volume, bytes) =
        head.split_once('=').ok_or_else(|| format!("`{head}`: write VOLUME=SIZE, such as root=4G"))?;
    let mut disk = DiskSpec { volume: volume.parse().map_err(text_of)?, size: size(bytes)?, from: None, store: None };
    while let Some(now) = rest {
        // Last: the name of a file may have commas.
        if let Some(file) = now.strip_prefix("from=").filter(|file| !file.is_empty()) {
            disk.from = Some(file.to_owned());
            break;
        }
        let (word, next) = now.split_once(',').map_or((now, None), |(word, next)| (word, Some(next)));
        match (word.split_once('='), &mut disk.store) {
            (Some(("shared", path)), store @ None) if !path.is_empty() => {
                *store = Some(Store::Shared { path: path.to_owned(), device: None, overwrite: false, zeroed: false });
            }
            (Some(("device", path)), Some(Store::Shared { device: device @ None, .. })) if !path.is_empty() => {
                *device = Some(path.to_owned());
            }
            (Some(("rados", pool)), store @ None) => *store = Some(Store::Rados { pool: pool.parse()? }),
            (Some(("device", path)), store @ None) if !path.is_empty() => {
                *store = Some(Store::Device { path: path.to_owned(), overwrite: false, zeroed: false });
            }
            (None, Some(Store::Device { overwrite, .. } | Store::Shared { device: Some(_), overwrite, .. }))
                if word == "overwrite" =>
            {
                *overwrite = true;
            }
            (None, Some(Store::Device { zeroed, .. } | Store::Shared { device: Some(_), zeroed, .. }))
                if word == "zeroed" =>
            {
                *zeroed = true;
            }
            _ => {
                return Err(format!(
                    "`{word}`: after the size only rados=POOL, shared=DIR, device=PATH, then overwrite and zeroed, and from=FILE may follow"
                ));
            }
        }
        rest = next;
    }
    Ok(disk)
}

/// `VOLUME,device=PATH[,overwrite][,zeroed]`.
///
/// # Errors
/// What is wrong with the text.
pub fn place(text: &str) -> Result<Placement, String> {
    let usage = || format!("`{text}`: write VOLUME,device=PATH, such as root,device=/dev/vg0/root");
    let mut words = text.split(',');
    let volume = words.next().unwrap_or_default().parse().map_err(text_of)?;
    let device = words.next().and_then(|word| word.strip_prefix("device=")).filter(|path| !path.is_empty());
    let device = device.ok_or_else(usage)?.to_owned();
    let mut place = Placement { volume, device, overwrite: false, zeroed: false };
    for word in words {
        match word {
            "overwrite" => place.overwrite = true,
            "zeroed" => place.zeroed = true,
            _ => return Err(format!("`{word}`: after the device only overwrite and zeroed may follow")),
        }
    }
    Ok(place)
}

/// `MAC[@COMPONENT][,name=PORT][,ip=IP]...[,mtu=N]`. Without a component it is for wires to take.
///
/// # Errors
/// What is wrong with the text.
pub fn nic(text: &str) -> Result<NicSpec, String> {
    let mut parts = text.split(',');
    let head = parts.next().unwrap_or_default();
    let (mac, component) = match head.split_once('@') {
        Some((mac, component)) => (mac, Some(component.parse().map_err(text_of)?)),
        None => (head, None),
    };
    if !mac.contains(':') {
        return Err(format!("`{head}`: write MAC@COMPONENT, such as 02:00:00:00:00:01@lan, or MAC alone"));
    }
    let mut nic = NicSpec { mac: mac.into(), component, name: None, ips: vec![], mtu: 0 };
    for part in parts {
        match part.split_once('=') {
            Some(("ip", ip)) => nic.ips.push(ip.parse().map_err(|_| format!("`{ip}` is no IP address"))?),
            Some(("name", name)) => nic.name = Some(name.parse().map_err(text_of)?),
            Some(("mtu", mtu)) => nic.mtu = mtu.parse().map_err(|_| format!("`{mtu}` is no MTU"))?,
            _ => return Err(format!("`{part}`: after the component only name=PORT, ip=IP and mtu=N may follow")),
        }
    }
    Ok(nic)
}

fn text_of(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The description that the command line gives.
///
/// # Errors
/// A file that cannot be read or makes no sense, or a description without memory.
pub fn from_args(args: &CreateArgs) -> Result<VmSpec, Failure> {
    let mut spec = match &args.file {
        Some(file) => read(file)?,
        None => Map::new(),
    };
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            spec.insert(key.into(), value);
        }
    };
    set("memory", args.memory.map(|m| json!(m)));
    set("vcpus", args.vcpus.map(Value::from));
    set("max_vcpus", args.max_vcpus.map(Value::from));
    set("cpu", args.cpu.clone().map(Value::from));
    set("machine", args.machine.clone().map(Value::from));
    set("accel", args.accel.clone().map(Value::from));
    set("on_cut", args.on_cut.clone().map(Value::from));
    set(
        "boot",
        args.kernel.as_ref().map(|kernel| {
            let cmdline = args.cmdline.clone().unwrap_or_default();
            json!({"kernel": {"kernel": kernel, "initrd": args.initrd, "cmdline": cmdline}})
        }),
    );
    append(&mut spec, "disks", &args.disks)?;
    append(&mut spec, "nics", &args.nics)?;
    append(&mut spec, "devices", &args.devices)?;
    let spec = understood(spec).map_err(Failure::usage)?;
    serde_json::from_value(Value::Object(spec)).map_err(|e| {
        Failure::usage(format!("the VM's description makes no sense: {e}; it needs memory, and disks or a kernel"))
    })
}

/// Adds what the options give to a list that the file may have begun.
fn append(spec: &mut Map<String, Value>, key: &str, items: &[impl Serialize]) -> Result<(), Failure> {
    if items.is_empty() {
        return Ok(());
    }
    let Value::Array(list) = spec.entry(key).or_insert_with(|| json!([])) else {
        return Err(Failure::usage(format!("`{key}` in the VM's description is no list")));
    };
    list.extend(items.iter().map(|item| json!(item)));
    Ok(())
}

fn read(file: &Path) -> Result<Map<String, Value>, Failure> {
    let name = file.display();
    let text = if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(file)
    };
    let text = text.map_err(|e| Failure::usage(format!("cannot read {name}: {e}")))?;
    let value: Result<Map<String, Value>, String> = if text.trim_start().starts_with('{') {
        serde_json::from_str(&text).map_err(text_of)
    } else {
        toml::from_str(&text).map_err(text_of)
    };
    value.map_err(|e| Failure::usage(format!("{name} is neither TOML nor JSON: {e}")))
}

/// Sizes may be written as people write them: the API takes bytes only.
fn understood(mut spec: Map<String, Value>) -> Result<Map<String, Value>, String> {
    fn in_bytes(value: &mut Value) -> Result<(), String> {
        if let Value::String(text) = value {
            *value = json!(size(text)?);
        }
        Ok(())
    }
    if let Some(memory) = spec.get_mut("memory") {
        in_bytes(memory)?;
    }
    for disk in spec.get_mut("disks").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(size) = disk.get_mut("size") {
            in_bytes(size)?;
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command, Vm};
    use clap::Parser;
    use godwit_units::Bytes;

    fn create(words: &[&str]) -> Result<VmSpec, Failure> {
        let line = [&["godwit", "vm", "create", "web", "--at", "texas"], words].concat();
        let Command::Vm(Vm::Create(args)) = Cli::try_parse_from(line).unwrap().command else { panic!("no creation") };
        from_args(&args)
    }

    #[test]
    fn a_place_is_a_volume_and_a_device_of_its_destination() {
        let placed = |overwrite, zeroed| Placement {
            volume: "root".parse().unwrap(),
            device: "/dev/vg0/root".into(),
            overwrite,
            zeroed,
        };
        assert_eq!(place("root,device=/dev/vg0/root"), Ok(placed(false, false)));
        assert_eq!(place("root,device=/dev/vg0/root,zeroed,overwrite"), Ok(placed(true, true)));
        for bad in
            ["root", "root,device=", "root,/dev/x", "root,device=/dev/x,from=/a", ",device=/dev/x", "root,zeroed"]
        {
            assert!(place(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn options_come_on_top_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web.toml");
        std::fs::write(&file, "memory = \"512M\"\nvcpus = 2\n[[disks]]\nvolume = \"root\"\nsize = \"4G\"\n").unwrap();
        let file = file.to_str().unwrap();
        let spec = create(&["--file", file, "--vcpus", "4", "--disk", "data=1G,from=/srv/data.raw"]).unwrap();
        assert_eq!((spec.memory, spec.vcpus), (Bytes::mib(512), 4));
        let disks: Vec<_> = spec.disks.iter().map(|d| (d.volume.as_str(), d.size, d.from.as_deref())).collect();
        assert_eq!(disks, [("root", Bytes::gib(4), None), ("data", Bytes::gib(1), Some("/srv/data.raw"))]);
    }

    #[test]
    fn a_disk_may_lie_on_a_device_or_on_shared_storage_and_a_file_comes_last() {
        let on = |text: &str| disk(text).map(|disk| (disk.store, disk.from)).unwrap();
        let device = |overwrite, zeroed| Some(Store::Device { path: "/dev/vg0/root".into(), overwrite, zeroed });
        assert_eq!(on("root=4G,device=/dev/vg0/root"), (device(false, false), None));
        let all = "root=4G,device=/dev/vg0/root,zeroed,overwrite,from=/a,b";
        assert_eq!(on(all), (device(true, true), Some("/a,b".into())));
        let pool = Some(Store::Rados { pool: "godwit@volumes/acme".parse().unwrap() });
        assert_eq!(on("root=4G,rados=godwit@volumes/acme,from=/a"), (pool, Some("/a".into())));
        let shared = |device: Option<&str>, overwrite| {
            let (path, device) = ("/mnt/nfs/web".into(), device.map(Into::into));
            Some(Store::Shared { path, device, overwrite, zeroed: false })
        };
        assert_eq!(on("root=4G,shared=/mnt/nfs/web"), (shared(None, false), None));
        assert_eq!(on("root=4G,shared=/mnt/nfs/web,device=/dev/x,overwrite").0, shared(Some("/dev/x"), true));
    }

    #[test]
    fn a_description_in_json_is_taken_as_the_api_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web");
        std::fs::write(&file, r#"{"memory": 67108864, "boot": {"kernel": {"kernel": "vmlinuz"}}}"#).unwrap();
        let spec =
            create(&["--file", file.to_str().unwrap(), "--nic", "02:00:00:00:00:01@lan,ip=10.0.0.2,mtu=1400"]).unwrap();
        assert_eq!(spec.memory, Bytes::mib(64));
        assert_eq!(
            (spec.nics[0].component.as_ref().unwrap().as_str(), spec.nics[0].ips.len(), spec.nics[0].mtu),
            ("lan", 1, 1400)
        );
    }

    #[test]
    fn a_description_that_makes_no_sense_is_a_usage_error() {
        assert!(create(&["--vcpus", "1"]).unwrap_err().message.contains("memory"));
        assert!(create(&["--file", "/nowhere/web.toml"]).unwrap_err().message.contains("/nowhere/web.toml"));
        for text in [
            "root",
            "root=",
            "root=4G,to=x",
            "Root=4G",
            "root=4G,from=",
            "root=4G,overwrite",
            "root=4G,device=",
            "root=4G,device=/a,device=/b",
            "root=4G,shared=/a,zeroed",
            "root=4G,rados=",
            "root=4G,rados=a,zeroed",
            "root=4G,rados=a,device=/b",
        ] {
            assert!(disk(text).is_err(), "{text}");
        }
        for text in ["lan", "02:00:00:00:00:01@", "02:00:00:00:00:01@lan,ip=x", "02:00:00:00:00:01@lan,up"] {
            assert!(nic(text).is_err(), "{text}");
        }
    }
}
