//! Making a deployment, and making a host a node of it.

use crate::args::{EnrollArgs, Global, InitArgs};
use crate::failure::Failure;
use godwit_api::trust::Home;
use godwit_trust::{Access, Authority, EnrolmentToken, Identity, Issued, KeyRequest, Role, TrustError, Validity};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The authority's folder, in the controller's state folder.
pub const AUTHORITY: &str = "ca";
/// The folder of a daemon's own certificate, in its state folder.
const CREDENTIALS: &str = "credentials";
/// The first admin's, in the controller's state folder; to be carried to where the admin works.
const ADMIN: &str = "admin";

/// No token comes near this.
const MAX_TOKEN: u64 = 4096;

/// The folder of a daemon's certificate, where nobody named one: what `init` or `enroll` made in its state folder, else the user's.
pub fn own_credentials(state: &Path) -> Result<PathBuf, Failure> {
    let own = state.join(CREDENTIALS);
    if own.exists() { Ok(own) } else { crate::user::own_credentials() }
}

/// A file that shows that the folder can be written to.
const PROBE: &str = "enrolling";

/// Makes the CA, the controller's certificate and a first admin's.
pub fn init(global: &Global, args: &InitArgs) -> Result<(), Failure> {
    let bad = |e: godwit_trust::IdentityError| Failure::usage(e.to_string());
    let controller = Identity::new(Role::Controller, global.controller_name.as_str()).map_err(bad)?;
    let admin = Identity::new(Role::Client(Access::Admin), args.admin.as_str()).map_err(bad)?;
    let validity = Validity::lasting(args.certificate_life);
    // First: where there is one already, nothing is written.
    let authority = Authority::create(&args.state.join(AUTHORITY))?;
    authority.issue(&controller, validity)?.write(&args.state.join(CREDENTIALS))?;
    authority.issue(&admin, validity)?.write(&args.state.join(ADMIN))?;
    let state = args.state.display();
    println!(
        "made an authority (fingerprint {}), and certificates for {controller} and {admin}",
        authority.fingerprint()
    );
    println!("start the controller: godwit controller --state {state}");
    println!("ask it as {admin}:    godwit --credentials {state}/{ADMIN} host ls");
    Ok(())
}

/// Has a key of this host certified.
pub fn enrol(global: &Global, args: &EnrollArgs) -> Result<(), Failure> {
    let token: EnrolmentToken = read_token(&args.token_file)?;
    let dir = args.state.join(CREDENTIALS);
    let key = KeyRequest::new(&token.identity)?;
    let home = Home { controller: global.controller.clone(), name: global.controller_name.clone() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Before the token is used up: what comes can be kept.
    let made: Vec<&Path> = [dir.as_path(), &args.state].into_iter().filter(|folder| !folder.exists()).collect();
    godwit_trust::keep_beside(&dir, PROBE, "")?;
    std::fs::remove_file(dir.join(PROBE))?;
    let given = runtime.block_on(home.enrol(&token, key.request_pem)).inspect_err(|_| {
        for folder in made {
            let _ = std::fs::remove_dir(folder);
        }
    })?;
    // First: a certificate that is there without it is not renewed.
    let text = serde_json::to_string_pretty(&home).map_err(std::io::Error::other)?;
    godwit_trust::keep_beside(&dir, Home::FILE, &text)?;
    Issued { ca_pem: given.ca, cert_pem: given.certificate, key_pem: key.key_pem }.write(&dir)?;
    println!("enrolled as {}; its certificate is in {}", token.identity, dir.display());
    Ok(())
}

/// The token in a file, or on standard input.
pub fn read_token<T: std::str::FromStr<Err = TrustError>>(path: &Path) -> Result<T, Failure> {
    let mut text = String::new();
    let named = |e: std::io::Error| std::io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    if path == Path::new("-") {
        std::io::stdin().take(MAX_TOKEN).read_to_string(&mut text)?;
    } else {
        let file = std::fs::File::open(path).map_err(named)?;
        file.take(MAX_TOKEN).read_to_string(&mut text).map_err(named)?;
    }
    Ok(text.parse()?)
}
