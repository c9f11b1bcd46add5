"""wheel: one library as a wheel, whose needs are those of its BUILD file."""

EdgesInfo = provider(fields = {
    "direct": "names of the libraries and packages in deps",
    "packages": "names of the pip packages within reach",
})

def _edges_impl(target, ctx):
    deps = [dep for dep in getattr(ctx.rule.attr, "deps", []) if EdgesInfo in dep]
    own = [target.label.name] if ctx.rule.kind == "pip_package" else []
    return [EdgesInfo(
        direct = [dep.label.package + ":" + dep.label.name for dep in deps],
        packages = depset(own, transitive = [dep[EdgesInfo].packages for dep in deps]),
    )]

edges = aspect(implementation = _edges_impl, attr_aspects = ["deps"])

def _wheel_impl(ctx):
    name, version = ctx.attr.name, ctx.attr.version
    out = ctx.actions.declare_file("align_%s-%s-py3-none-any.whl" % (name, version))
    spec = ctx.actions.declare_file(name + ".wheel.json")
    reached = ctx.attr.library[EdgesInfo]
    root = ctx.attr.sources.label.package + "/"
    ctx.actions.write(spec, json.encode({
        "library": name,
        "version": version,
        "direct": reached.direct,
        "packages": sorted(reached.packages.to_list()),
        "files": {src.short_path[len(root):]: src.path for src in ctx.files.sources},
        "license": ctx.file.license.path,
    }))
    ctx.actions.run(
        executable = ctx.file._python,
        arguments = ["-I", ctx.file._maker.path, spec.path, out.path],
        inputs = ctx.files.sources + [spec, ctx.file.license, ctx.file._maker, ctx.file._pyvenv],
        outputs = [out],
        mnemonic = "Wheel",
        progress_message = "Making the wheel of align.%s" % name,
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "library": attr.label(mandatory = True, aspects = [edges], doc = "by its public alias, as another repository names it"),
        "sources": attr.label(mandatory = True, doc = "all files of the library's package"),
        "version": attr.string(mandatory = True),
        "license": attr.label(default = "//:LICENSE", allow_single_file = True),
        "_maker": attr.label(default = "//tools/wheel:make_wheel.py", allow_single_file = True),
        "_python": attr.label(default = "@align_python//:venv/bin/python3", allow_single_file = True),
        "_pyvenv": attr.label(default = "@align_python//:venv/pyvenv.cfg", allow_single_file = True),
    },
)
