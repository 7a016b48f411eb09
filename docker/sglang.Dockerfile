# kvfold in SGLang's own image. From the root of the repository:
#   docker build --file docker/sglang.Dockerfile --tag kvfold-sglang .
#   docker run --gpus all --ipc host --publish 8000:8000 --volume kvfold:/data kvfold-sglang \
#     Qwen/Qwen3-8B --recipe saw-int4 --host 0.0.0.0 --port 8000 --enable-metrics
FROM lmsysorg/sglang:v0.5.23

COPY pyproject.toml README.md LICENSE /opt/kvfold/
COPY src /opt/kvfold/src
# The image has the SGLang that the extra asks for, so pip leaves it as it is.
RUN pip install --no-cache-dir "/opt/kvfold[sglang]" && kvfold --version

# Models, artifacts and compiled kernels outlive the container.
ENV HF_HOME=/data/huggingface KVFOLD_CACHE=/data/kvfold TRITON_CACHE_DIR=/data/triton
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["kvfold", "serve", "--engine", "sglang"]
