"""Certificates for tests of TLS, made with the program openssl."""

import shutil
import subprocess

import pytest

CONFIG = """
[ca]
default_ca = this
[this]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
copy_extensions = copy
unique_subject = no
[any]
commonName = optional
organizationalUnitName = optional
"""
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """Signs certificates; its files are in `folder`."""

    def __init__(self, folder):
        if shutil.which("openssl") is None:
            pytest.skip("this test needs the program openssl")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ca, self.key = folder, folder / "ca.pem", folder / "ca.key"
        (folder / "index").touch()
        (folder / "config").write_text(CONFIG.format(folder=folder))
        self.run("req", "-x509", *KEY, "-keyout", self.key, "-out", self.ca, "-days", 30, "-subj", "/CN=authority")

    def run(self, *command):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, cwd=self.folder)

    def sign(self, file, *names, unit=None, expired=False):
        """Write a certificate for the names ("DNS:..." or "URI:...") and its key; return the paths for TLS."""
        certificate, key, request = (self.folder / f"{file}.{end}" for end in ("pem", "key", "request"))
        subject = f"/OU={unit}" if unit else "/CN=worker"
        extension = ("-addext", "subjectAltName=" + ",".join(names))
        self.run("req", "-new", *KEY, "-keyout", key, "-out", request, "-subj", subject, *extension)
        time = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z") if expired else ("-days", 1)
        signer = ("-config", "config", "-cert", self.ca, "-keyfile", self.key)
        self.run("ca", "-batch", "-notext", *signer, *time, "-in", request, "-out", certificate)
        return {"certificate": certificate, "key": key, "ca": self.ca}

    def revoke(self, certificate):
        """Return the path of a file with this authority's certificate and its list of revoked ones."""
        signer = ("-config", "config", "-cert", self.ca, "-keyfile", self.key)
        self.run("ca", *signer, "-revoke", certificate)
        self.run("ca", *signer, "-gencrl", "-crldays", 1, "-out", "revoked.pem")
        both = self.folder / "ca_with_revocations.pem"
        both.write_text(self.ca.read_text() + (self.folder / "revoked.pem").read_text())
        return both


def tls_environment(files):
    """Return the environment variables for the paths that Authority.sign() returns."""
    return {f"TORCHRPC_TLS_{name.upper()}": str(path) for name, path in files.items()}
